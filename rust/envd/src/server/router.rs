//! Which handler answers a request.

use std::sync::Arc;

use hyper::header::{HeaderMap, HeaderValue};
use hyper::{Method, StatusCode};

use crate::error::HttpError;
use crate::http::{empty, Request, Response};
use crate::state::State;
use crate::{auth, files, filesystem};

/// Answers one request; every response carries the CORS headers that browsers need.
pub async fn route(request: Request, state: Arc<State>) -> Response {
    let mut response = if request.method() == Method::OPTIONS {
        empty(StatusCode::NO_CONTENT)
    } else {
        dispatch(request, state).await.unwrap_or_else(HttpError::into_response)
    };
    allow_cross_origin(response.headers_mut());
    response
}

async fn dispatch(request: Request, state: Arc<State>) -> Result<Response, HttpError> {
    let path = request.uri().path().to_owned();
    // These three decide on access themselves.
    if path == "/health" {
        only(&request, &Method::GET)?;
        return Ok(empty(StatusCode::NO_CONTENT));
    }
    if path == "/files" || path.starts_with("/files/") {
        return Ok(files::handle(request, state).await);
    }

    auth::check_token(state.settings().access_token.as_deref(), request.headers())?;
    if let Some(method) = path.strip_prefix("/filesystem.Filesystem/") {
        only(&request, &Method::POST)?;
        return Ok(filesystem::dispatch(method, request, state).await);
    }
    Err(HttpError::new(StatusCode::NOT_FOUND, format!("no such path: {path}")))
}

/// # Errors
/// 405 when the request's method is another.
fn only(request: &Request, method: &Method) -> Result<(), HttpError> {
    if request.method() == method || (method == Method::GET && request.method() == Method::HEAD) {
        return Ok(());
    }
    let message = format!("{} is not allowed on {}, use {method}", request.method(), request.uri().path());
    Err(HttpError::new(StatusCode::METHOD_NOT_ALLOWED, message))
}

fn allow_cross_origin(headers: &mut HeaderMap) {
    for (name, value) in [
        ("access-control-allow-origin", "*"),
        ("access-control-allow-methods", "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"),
        ("access-control-allow-headers", "*, Authorization"),
        (
            "access-control-expose-headers",
            "Location, Content-Disposition, Content-Encoding, Content-Range, Last-Modified",
        ),
        ("access-control-max-age", "7200"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
}
