//! The Connect protocol, JSON codec: unary calls here, streams in [`stream`], framing in [`envelope`].
//!
//! A failed unary call is an HTTP error status with a JSON body. A failed stream is HTTP 200 with an end-of-stream message that
//! carries the error: SDKs lose the code of a stream that answers another status.

mod budget;
pub mod envelope;
pub mod stream;

use std::future::Future;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Body;
use hyper::header::{HeaderMap, CONTENT_ENCODING, CONTENT_TYPE};
use hyper::StatusCode;
use serde::de::DeserializeOwned;
use serde::Serialize;

use crate::error::{json_response, HttpError, RpcError};
use crate::http::{Request, RequestBody, Response};
use budget::{Share, FREE};

pub use stream::{client_stream, server_stream, EventSink, MessageSource};

/// Longest unary request and longest single stream message, in bytes. Decoding takes about three times as much for a moment, in
/// guests that may have little memory; bulk data goes through /files. See [`budget`] for many at a time.
pub const MAX_MESSAGE: usize = 32 << 20;

/// A message whose next bytes do not come for so long has been abandoned.
const IDLE: Duration = Duration::from_secs(60);

/// Seconds between keepalives of a stream whose client names no interval.
const DEFAULT_KEEPALIVE_SECONDS: u64 = 90;

/// What the headers say about a call.
#[derive(Debug, Clone)]
pub struct Call {
    /// The request's headers.
    pub headers: HeaderMap,
    /// `Connect-Timeout-Ms`; `None` is no limit.
    pub timeout: Option<Duration>,
    /// `Keepalive-Ping-Interval`, at least one second.
    pub keepalive: Duration,
}

impl Call {
    fn parse(headers: &HeaderMap) -> Result<Self, RpcError> {
        let number = |name: &str| match headers.get(name) {
            None => Ok(None),
            Some(value) => {
                let parsed = value.to_str().ok().and_then(|text| text.trim().parse::<u64>().ok());
                parsed.map(Some).ok_or_else(|| {
                    RpcError::invalid_argument(format!("header {name}: {value:?} is not a non-negative integer"))
                })
            }
        };
        // The protocol allows ten digits; a longer timeout is as good as none, and 0 is the SDKs' "unlimited".
        let timeout = number("connect-timeout-ms")?.filter(|&ms| ms > 0 && ms < 10_000_000_000);
        let keepalive = number("keepalive-ping-interval")?.unwrap_or(DEFAULT_KEEPALIVE_SECONDS);
        Ok(Self {
            headers: headers.clone(),
            timeout: timeout.map(Duration::from_millis),
            keepalive: Duration::from_secs(keepalive.clamp(1, 86_400)),
        })
    }
}

/// Serves a unary call: decodes the JSON body as `I`, awaits the handler within the call's timeout, encodes its answer.
pub async fn unary<I, O, F, Fut>(request: Request, handler: F) -> Response
where
    I: DeserializeOwned,
    O: Serialize,
    F: FnOnce(Call, I) -> Fut,
    Fut: Future<Output = Result<O, RpcError>>,
{
    let (parts, body) = request.into_parts();
    if let Err(response) = require_content_type(&parts.headers, "application/json") {
        return *response;
    }
    let outcome = async {
        require_identity(&parts.headers, CONTENT_ENCODING.as_str())?;
        let call = Call::parse(&parts.headers)?;
        // Held until the handler is done with what was decoded.
        let (input, _share) = read_message(body).await?;
        let timeout = call.timeout;
        with_deadline(timeout, handler(call, input)).await
    };
    match outcome.await {
        Ok(output) => json_response(StatusCode::OK, &output),
        Err(error) => error.into_response(),
    }
}

/// Reads and decodes the message that is a whole body.
async fn read_message<I: DeserializeOwned>(mut body: RequestBody) -> Result<(I, Share), RpcError> {
    let too_long = || RpcError::resource_exhausted(format!("request body is larger than {MAX_MESSAGE} bytes"));
    let announced = body.size_hint().exact().map(|length| usize::try_from(length).unwrap_or(usize::MAX));
    if announced.is_some_and(|length| length > MAX_MESSAGE) {
        return Err(too_long());
    }
    let mut share = Share::of(announced.unwrap_or(0)).await?;
    let mut bytes = BytesMut::with_capacity(announced.unwrap_or(0));
    while let Some(data) = next_data(&mut body).await? {
        if data.len() > MAX_MESSAGE - bytes.len() {
            return Err(too_long());
        }
        if announced.is_none() && share.bytes() == 0 && bytes.len() + data.len() > FREE {
            share = Share::of(MAX_MESSAGE).await?;
        }
        bytes.extend_from_slice(&data);
    }
    share.shrink(bytes.len());
    share.add_strings(&bytes)?;
    Ok((decode(&bytes)?, share))
}

/// The next bytes of a message that is coming; `None` at the end of the body.
async fn next_data(body: &mut RequestBody) -> Result<Option<Bytes>, RpcError> {
    match tokio::time::timeout(IDLE, body.frame()).await {
        Ok(None) => Ok(None),
        Ok(Some(Ok(frame))) => Ok(Some(frame.into_data().unwrap_or_default())),
        Ok(Some(Err(error))) => Err(RpcError::invalid_argument(format!("cannot read the request: {error}"))),
        Err(_) => Err(RpcError::deadline_exceeded(format!("nothing was sent for {} s", IDLE.as_secs()))),
    }
}

/// Decodes one JSON message; an empty body is an empty message.
fn decode<I: DeserializeOwned>(bytes: &[u8]) -> Result<I, RpcError> {
    let bytes = if bytes.is_empty() { b"{}" } else { bytes };
    // serde would also take an array of the fields in order.
    if bytes.trim_ascii_start().first() != Some(&b'{') {
        return Err(RpcError::invalid_argument("cannot decode the request message: it is not a JSON object"));
    }
    serde_json::from_slice(bytes)
        .map_err(|error| RpcError::invalid_argument(format!("cannot decode the request message: {error}")))
}

async fn with_deadline<T>(
    timeout: Option<Duration>,
    work: impl Future<Output = Result<T, RpcError>>,
) -> Result<T, RpcError> {
    match timeout {
        None => work.await,
        Some(limit) => tokio::time::timeout(limit, work).await.unwrap_or_else(|_| Err(deadline_exceeded(limit))),
    }
}

fn deadline_exceeded(limit: Duration) -> RpcError {
    RpcError::deadline_exceeded(format!("the call's timeout of {} ms has passed", limit.as_millis()))
}

/// Connect asks for 415 and the accepted type when a call comes in another codec.
fn require_content_type(headers: &HeaderMap, wanted: &'static str) -> Result<(), Box<Response>> {
    let given = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    let essence = given.split(';').next().unwrap_or("").trim();
    if essence.eq_ignore_ascii_case(wanted) {
        return Ok(());
    }
    let message = format!("content type '{given}' is not supported here, send '{wanted}'");
    let mut response = HttpError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message).into_response();
    response.headers_mut().insert("accept-post", hyper::header::HeaderValue::from_static(wanted));
    Err(Box::new(response))
}

fn require_identity(headers: &HeaderMap, name: &str) -> Result<(), RpcError> {
    match headers.get(name).map(|value| value.as_bytes()) {
        None | Some(b"" | b"identity") => Ok(()),
        Some(other) => Err(RpcError::unimplemented(format!(
            "{name} '{}' is not supported, send 'identity'",
            String::from_utf8_lossy(other)
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::HeaderValue;

    fn call(pairs: &[(&'static str, &'static str)]) -> Result<Call, RpcError> {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.insert(*name, HeaderValue::from_static(value));
        }
        Call::parse(&headers)
    }

    #[test]
    fn reads_timeout_and_keepalive() {
        let parsed = call(&[("connect-timeout-ms", "1500"), ("keepalive-ping-interval", "50")]).expect("valid");
        assert_eq!((parsed.timeout, parsed.keepalive), (Some(Duration::from_millis(1500)), Duration::from_secs(50)));
        let parsed = call(&[("connect-timeout-ms", "0"), ("keepalive-ping-interval", "0")]).expect("valid");
        assert_eq!((parsed.timeout, parsed.keepalive), (None, Duration::from_secs(1)));
        assert_eq!(call(&[]).expect("valid").keepalive, Duration::from_secs(90));
        assert!(call(&[("connect-timeout-ms", "soon")]).is_err());
    }

    #[test]
    fn content_type_ignores_parameters_and_case() {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("Application/JSON; charset=utf-8"));
        assert!(require_content_type(&headers, "application/json").is_ok());
        let refused = require_content_type(&headers, "application/connect+json").expect_err("refused");
        assert_eq!(refused.status(), StatusCode::UNSUPPORTED_MEDIA_TYPE);
    }
}
