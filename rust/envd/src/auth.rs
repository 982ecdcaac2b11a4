//! Who may call: the sandbox's access token, and signatures of file URLs.

use base64::engine::general_purpose::STANDARD_NO_PAD;
use base64::Engine;
use hyper::header::{HeaderMap, HeaderValue};
use hyper::StatusCode;
use sha2::{Digest, Sha256};

use crate::error::HttpError;

/// Header that carries the access token.
pub const ACCESS_TOKEN_HEADER: &str = "x-access-token";

/// What a signed file URL allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileOperation {
    /// Download.
    Read,
    /// Upload.
    Write,
}

impl FileOperation {
    fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// The query of a file request, exactly as sent (decoded, not resolved).
#[derive(Debug, Clone, Copy)]
pub struct SignedQuery<'a> {
    /// `path`.
    pub path: &'a str,
    /// `username`, or empty.
    pub username: &'a str,
    /// `signature`.
    pub signature: Option<&'a str>,
    /// `signature_expiration`, unix seconds.
    pub expiration: Option<&'a str>,
}

/// Checks the `X-Access-Token` header. A sandbox without a token is open.
///
/// # Errors
/// 401 when the header is missing or wrong.
pub fn check_token(token: Option<&str>, headers: &HeaderMap) -> Result<(), HttpError> {
    match token {
        Some(token) if !has_token(token, headers) => {
            Err(unauthorized("unauthorized access, please provide a valid access token or method signing if supported"))
        }
        _ => Ok(()),
    }
}

/// Checks a file request: a valid header token, or a valid signature that has not expired at `now` (unix seconds).
///
/// # Errors
/// 401 saying what is missing or wrong.
pub fn check_file_access(
    token: Option<&str>,
    headers: &HeaderMap,
    operation: FileOperation,
    query: SignedQuery<'_>,
    now: u64,
) -> Result<(), HttpError> {
    let Some(token) = token else { return Ok(()) };
    if has_token(token, headers) {
        return Ok(());
    }
    if headers.contains_key(ACCESS_TOKEN_HEADER) && query.signature.is_none() {
        return check_token(Some(token), headers);
    }
    let signature = query.signature.ok_or_else(|| unauthorized("missing signature query parameter"))?;
    let expiration = match query.expiration {
        None | Some("") => None,
        Some(text) => Some(text.parse::<u64>().map_err(|_| unauthorized("invalid signature expiration"))?),
    };
    let expected = file_signature(query.path, operation, query.username, token, expiration);
    if !constant_time_eq(expected.as_bytes(), signature.as_bytes()) {
        return Err(unauthorized("invalid signature"));
    }
    match expiration {
        Some(at) if at < now => Err(unauthorized("signature is already expired")),
        _ => Ok(()),
    }
}

/// `"v1_" + base64_nopad(sha256("path:op:username:token[:expiration]"))`, as the SDKs compute it.
pub fn file_signature(
    path: &str,
    operation: FileOperation,
    username: &str,
    token: &str,
    expiration: Option<u64>,
) -> String {
    let mut message = format!("{path}:{}:{username}:{token}", operation.as_str());
    if let Some(expiration) = expiration {
        message.push_str(&format!(":{expiration}"));
    }
    format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(message)))
}

fn has_token(token: &str, headers: &HeaderMap) -> bool {
    is_token(token, headers.get(ACCESS_TOKEN_HEADER).map(HeaderValue::as_bytes))
}

/// Whether `given` is the token.
pub fn is_token(token: &str, given: Option<&[u8]>) -> bool {
    given.is_some_and(|given| constant_time_eq(token.as_bytes(), given))
}

fn unauthorized(message: &str) -> HttpError {
    HttpError::new(StatusCode::UNAUTHORIZED, message)
}

/// Compares without leaking where the first difference is; the length is not secret.
fn constant_time_eq(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && std::hint::black_box(a.iter().zip(b).fold(0, |acc, (x, y)| acc | (x ^ y))) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query<'a>(signature: Option<&'a str>, expiration: Option<&'a str>) -> SignedQuery<'a> {
        SignedQuery { path: "/tmp/x", username: "user", signature, expiration }
    }

    #[test]
    fn signature_matches_the_published_recipe() {
        // printf '%s' '/tmp/x:read:user:tok:100' | sha256sum | xxd -r -p | base64
        let signature = file_signature("/tmp/x", FileOperation::Read, "user", "tok", Some(100));
        assert!(signature.starts_with("v1_") && !signature.ends_with('=') && signature.len() == 3 + 43, "{signature}");
        assert_ne!(signature, file_signature("/tmp/x", FileOperation::Write, "user", "tok", Some(100)));
        assert_ne!(signature, file_signature("/tmp/x", FileOperation::Read, "user", "tok", None));
    }

    #[test]
    fn file_access_by_token_or_signature() {
        let check = |headers: &HeaderMap, query| {
            check_file_access(Some("tok"), headers, FileOperation::Read, query, 50).map_err(|error| error.message)
        };
        let none = HeaderMap::new();
        let signature = file_signature("/tmp/x", FileOperation::Read, "user", "tok", Some(100));
        assert_eq!(check(&none, query(Some(&signature), Some("100"))), Ok(()));
        assert_eq!(check(&none, query(None, None)), Err("missing signature query parameter".into()));
        assert_eq!(check(&none, query(Some("v1_x"), None)), Err("invalid signature".into()));
        assert_eq!(check(&none, query(Some(&signature), Some("101"))), Err("invalid signature".into()));
        let old = file_signature("/tmp/x", FileOperation::Read, "user", "tok", Some(49));
        assert_eq!(check(&none, query(Some(&old), Some("49"))), Err("signature is already expired".into()));
        let mut headers = HeaderMap::new();
        headers.insert(ACCESS_TOKEN_HEADER, HeaderValue::from_static("tok"));
        assert_eq!(check(&headers, query(None, None)), Ok(()));
        assert!(check_file_access(None, &none, FileOperation::Read, query(None, None), 50).is_ok());
    }

    #[test]
    fn token_is_required_once_there_is_one() {
        let mut headers = HeaderMap::new();
        assert!(check_token(None, &headers).is_ok());
        assert!(check_token(Some("tok"), &headers).is_err());
        headers.insert(ACCESS_TOKEN_HEADER, HeaderValue::from_static("tok"));
        assert!(check_token(Some("tok"), &headers).is_ok());
        assert!(check_token(Some("tok2"), &headers).is_err());
    }
}
