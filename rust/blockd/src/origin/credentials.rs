//! Request headers and how they are renewed.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};

use http::header::{
    HeaderMap, HeaderName, HeaderValue, ACCEPT_ENCODING, CONNECTION, CONTENT_LENGTH, HOST, IF_MATCH, IF_MODIFIED_SINCE,
    IF_NONE_MATCH, IF_RANGE, IF_UNMODIFIED_SINCE, RANGE, TE, TRANSFER_ENCODING, UPGRADE,
};

use super::{OriginError, OriginOptions};

/// Headers that are ours to set: they frame the message or change what comes back.
const RESERVED: [HeaderName; 13] = [
    ACCEPT_ENCODING,
    CONNECTION,
    CONTENT_LENGTH,
    HOST,
    IF_MATCH,
    IF_MODIFIED_SINCE,
    IF_NONE_MATCH,
    IF_RANGE,
    IF_UNMODIFIED_SINCE,
    RANGE,
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Request headers of one origin. `Debug` shows names only.
#[derive(Clone, Default)]
pub struct Headers(HeaderMap);

impl Headers {
    /// Checks names and values.
    ///
    /// # Errors
    /// [`OriginError::Header`]: not a header, or one that the origin sets itself (`Range`, `Host`, …).
    pub fn new<N: AsRef<str>, V: AsRef<str>>(pairs: impl IntoIterator<Item = (N, V)>) -> Result<Self, OriginError> {
        let mut map = HeaderMap::new();
        for (name, value) in pairs {
            let shown = || OriginError::Header(name.as_ref().chars().take(100).collect());
            let parsed = HeaderName::from_bytes(name.as_ref().as_bytes()).map_err(|_| shown())?;
            if RESERVED.contains(&parsed) {
                return Err(shown());
            }
            let mut value = HeaderValue::from_str(value.as_ref()).map_err(|_| shown())?;
            value.set_sensitive(true);
            map.append(parsed, value);
        }
        Ok(Self(map))
    }

    pub(super) fn map(&self) -> &HeaderMap {
        &self.0
    }
}

impl fmt::Debug for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// What [`Credentials::refresh`] returns.
pub type RefreshFuture = Pin<Box<dyn Future<Output = Result<Headers, String>> + Send>>;

/// Who can renew an origin's headers.
pub trait Credentials: Send + Sync {
    /// Called when the origin at `url` answered 401 or 403. The result replaces all headers; an error's text says why there
    /// are none. The wait is bounded by [`OriginOptions::refresh_timeout`], after which the future is dropped.
    fn refresh(&self, url: &str) -> RefreshFuture;
}

/// Nobody renews: the first 401 or 403 is final.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoCredentials;

impl Credentials for NoCredentials {
    fn refresh(&self, _url: &str) -> RefreshFuture {
        Box::pin(std::future::ready(Err("nobody renews them".to_owned())))
    }
}

/// An origin's current headers with the number of the renewal they came from.
pub(super) struct Current {
    headers: Mutex<(u64, Headers)>,
    refreshing: tokio::sync::Mutex<()>,
}

impl Current {
    pub(super) fn new(headers: Headers) -> Self {
        Self { headers: Mutex::new((0, headers)), refreshing: tokio::sync::Mutex::new(()) }
    }

    pub(super) fn get(&self) -> (u64, Headers) {
        self.headers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set(&self, headers: Headers) {
        let mut current = self.headers.lock().unwrap_or_else(PoisonError::into_inner);
        *current = (current.0 + 1, headers);
    }

    /// Headers newer than `used`, which were answered with `status`: those that another request fetched meanwhile, or new
    /// ones. `Ok(true)` if this call fetched them.
    pub(super) async fn renew(
        &self,
        used: u64,
        status: u16,
        url: &str,
        credentials: &dyn Credentials,
        options: &OriginOptions,
    ) -> Result<bool, OriginError> {
        let _turn = self.refreshing.lock().await;
        if self.get().0 != used {
            return Ok(false);
        }
        let headers = tokio::time::timeout(options.refresh_timeout, credentials.refresh(url))
            .await
            .unwrap_or_else(|_| Err(format!("no answer within {:?}", options.refresh_timeout)))
            .map_err(|why| OriginError::Refresh(status, why))?;
        self.set(headers);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_checked_and_never_shown() {
        let headers = Headers::new([("Authorization", "Bearer s3cret")]).unwrap();
        assert_eq!(format!("{headers:?}"), r#"{"authorization"}"#);
        for (name, value) in [("Range", "bytes=0-"), ("host", "x"), ("a b", "x"), ("x", "a\r\nb: c"), ("", "x")] {
            assert!(Headers::new([(name, value)]).is_err(), "{name}: {value}");
        }
    }
}
