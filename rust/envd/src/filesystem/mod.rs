//! `filesystem.Filesystem` RPCs.

use std::sync::Arc;

use crate::error::RpcError;
use crate::http::{Request, Response};
use crate::state::State;

/// Answers `POST /filesystem.Filesystem/<method>`. The access token has been checked.
pub async fn dispatch(method: &str, _request: Request, _state: Arc<State>) -> Response {
    RpcError::unimplemented(format!("filesystem.Filesystem/{method} does not exist")).into_response()
}
