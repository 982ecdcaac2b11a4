//! The errors a client can see, and how each looks on the wire.
//!
//! RPC handlers return [`RpcError`] (a Connect code and a message), plain HTTP handlers [`HttpError`] (a status and a
//! message). Both render as JSON with `code` and `message`, as the SDKs require.

use bytes::Bytes;
use hyper::header::{HeaderValue, CONTENT_TYPE};
use hyper::StatusCode;
use serde::Serialize;

use crate::http::{full, Response};

/// A Connect status code; the names on the wire are the snake_case ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Code {
    Canceled,
    Unknown,
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Aborted,
    OutOfRange,
    Unimplemented,
    Internal,
    Unavailable,
    DataLoss,
    Unauthenticated,
}

impl Code {
    /// The HTTP status of a failed unary call (Connect protocol, "Error codes").
    pub fn http_status(self) -> StatusCode {
        let status = match self {
            Self::Canceled => 499,
            Self::InvalidArgument | Self::FailedPrecondition | Self::OutOfRange => 400,
            Self::Unauthenticated => 401,
            Self::PermissionDenied => 403,
            Self::NotFound => 404,
            Self::AlreadyExists | Self::Aborted => 409,
            Self::ResourceExhausted => 429,
            Self::Unimplemented => 501,
            Self::Unavailable => 503,
            Self::DeadlineExceeded => 504,
            Self::Unknown | Self::Internal | Self::DataLoss => 500,
        };
        StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }
}

/// A failed RPC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{message}")]
pub struct RpcError {
    /// What kind of failure, for programs.
    pub code: Code,
    /// What was wrong, with which value, for people.
    pub message: String,
}

macro_rules! constructors {
    ($($name:ident => $code:ident),* $(,)?) => {
        $(
            #[doc = concat!("An error with code [`Code::", stringify!($code), "`].")]
            pub fn $name(message: impl Into<String>) -> Self {
                Self { code: Code::$code, message: message.into() }
            }
        )*
    };
}

impl RpcError {
    constructors! {
        already_exists => AlreadyExists,
        deadline_exceeded => DeadlineExceeded,
        failed_precondition => FailedPrecondition,
        internal => Internal,
        invalid_argument => InvalidArgument,
        not_found => NotFound,
        permission_denied => PermissionDenied,
        resource_exhausted => ResourceExhausted,
        unauthenticated => Unauthenticated,
        unavailable => Unavailable,
        unimplemented => Unimplemented,
    }

    /// The answer to a failed unary call: the code's HTTP status and `{"code":"not_found","message":"…"}`.
    pub fn into_response(self) -> Response {
        json_response(self.code.http_status(), &self)
    }
}

/// A failed plain HTTP request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct HttpError {
    /// Status line and `code` of the body.
    pub status: StatusCode,
    /// What was wrong, with which value.
    pub message: String,
}

impl HttpError {
    /// An error with the given status.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    /// The answer: the status and `{"code":404,"message":"…"}`.
    pub fn into_response(self) -> Response {
        #[derive(Serialize)]
        struct Wire<'a> {
            code: u16,
            message: &'a str,
        }
        json_response(self.status, &Wire { code: self.status.as_u16(), message: &self.message })
    }
}

impl From<RpcError> for HttpError {
    fn from(error: RpcError) -> Self {
        Self { status: error.code.http_status(), message: error.message }
    }
}

/// A JSON response; content type exactly `application/json`.
pub fn json_response(status: StatusCode, value: &impl Serialize) -> Response {
    // Our wire types have string keys and no fallible Serialize impl, so the empty fallback is never sent.
    let body = serde_json::to_vec(value).unwrap_or_default();
    let mut response = Response::new(full(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_snake_case_and_map_to_the_connect_table() {
        let wire = serde_json::to_string(&RpcError::not_found("x")).expect("serialisable");
        assert_eq!(wire, r#"{"code":"not_found","message":"x"}"#);
        assert_eq!(Code::Canceled.http_status().as_u16(), 499);
        assert_eq!(Code::FailedPrecondition.http_status().as_u16(), 400);
        assert_eq!(Code::DeadlineExceeded.http_status().as_u16(), 504);
    }
}
