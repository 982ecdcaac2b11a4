//! Which handler answers a request.

use std::sync::Arc;

use super::{configure, sync};
use hyper::header::{HeaderMap, HeaderValue};
use hyper::{Method, StatusCode};

use crate::error::{json_response, HttpError};
use crate::http::{empty, Peer, Request, Response};
use crate::state::State;
use crate::{auth, files, filesystem, process};

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
    // These decide on access themselves.
    match path.as_str() {
        "/health" => {
            only(&request, &Method::GET)?;
            return Ok(empty(StatusCode::NO_CONTENT));
        }
        "/init" => {
            only(&request, &Method::POST)?;
            from_host(&request, &state)?;
            // Whoever gave the sandbox its token, or the one it was copied from, knows it; what else can reach this does not.
            check_token(&request, &state)?;
            return configure::handle(request, &state).await;
        }
        "/sync" => {
            only(&request, &Method::POST)?;
            from_host(&request, &state)?;
            check_token(&request, &state)?;
            return sync::handle(request).await;
        }
        path if path == "/files" || path.starts_with("/files/") => return Ok(files::handle(request, state).await),
        _ => {}
    }

    check_token(&request, &state)?;
    if let Some(method) = path.strip_prefix("/process.Process/") {
        only(&request, &Method::POST)?;
        return Ok(process::dispatch(method, request, state).await);
    }
    if let Some(method) = path.strip_prefix("/filesystem.Filesystem/") {
        only(&request, &Method::POST)?;
        return Ok(filesystem::dispatch(method, request, state).await);
    }
    match path.as_str() {
        "/metrics" => {
            only(&request, &Method::GET)?;
            Ok(json_response(StatusCode::OK, &state.meter.measure()))
        }
        "/envs" => {
            only(&request, &Method::GET)?;
            Ok(json_response(StatusCode::OK, &state.settings().envs))
        }
        _ => Err(HttpError::new(StatusCode::NOT_FOUND, format!("no such path: {path}"))),
    }
}

/// # Errors
/// 401 when the request lacks the sandbox's token.
fn check_token(request: &Request, state: &State) -> Result<(), HttpError> {
    state.with_settings(|settings| auth::check_token(settings.access_token.as_deref(), request.headers()))
}

/// Only the host may configure a guest: programs inside it could otherwise set its token or clock.
///
/// # Errors
/// 403 when the request comes from the guest itself, a container in it included.
fn from_host(request: &Request, state: &State) -> Result<(), HttpError> {
    if !request.extensions().get::<Peer>().is_some_and(|peer| state.is_host(peer.0)) {
        return Err(HttpError::new(StatusCode::FORBIDDEN, "only the host may call this"));
    }
    Ok(())
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
