//! `/files`: upload and download.

use std::sync::Arc;

use hyper::StatusCode;

use crate::error::HttpError;
use crate::http::{Request, Response};
use crate::state::State;

/// Answers every method of `/files` and `/files/…`. The access token has not been checked: see `auth::check_file_access`.
pub async fn handle(_request: Request, _state: Arc<State>) -> Response {
    HttpError::new(StatusCode::NOT_IMPLEMENTED, "/files is not available").into_response()
}
