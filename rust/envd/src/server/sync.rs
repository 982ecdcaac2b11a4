//! `POST /sync`: what the host asks for before it captures a guest.

use std::io;

use hyper::StatusCode;
use serde::Deserialize;
use tokio::task::spawn_blocking;

use crate::error::HttpError;
use crate::http::{empty, read_body, Request, Response};

const MAX_BODY: usize = 4 << 10;

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Options {
    /// Whether to flush the file systems, so that the disk alone is a whole machine.
    flush: bool,
    /// Whether to give up what memory holds of the disk, so that a capture of the memory does not hold it as well.
    drop_caches: bool,
}

/// Does as asked; 204 when it is done.
///
/// # Errors
/// 400 for a malformed body, 500 when the kernel refuses.
pub async fn handle(request: Request) -> Result<Response, HttpError> {
    let body = read_body(request.into_body(), MAX_BODY).await?;
    let options: Options = match &body[..] {
        [] => Options { flush: true, drop_caches: false },
        body => serde_json::from_slice(body)
            .map_err(|error| HttpError::new(StatusCode::BAD_REQUEST, format!("cannot decode the body: {error}")))?,
    };
    let failed = |error: io::Error| HttpError::new(StatusCode::INTERNAL_SERVER_ERROR, format!("cannot sync: {error}"));
    // Both can take seconds, and a file system that hangs for ever.
    spawn_blocking(move || options.apply()).await.map_err(io::Error::from).and_then(|done| done).map_err(failed)?;
    Ok(empty(StatusCode::NO_CONTENT))
}

impl Options {
    fn apply(&self) -> io::Result<()> {
        if self.flush {
            nix::unistd::sync();
        }
        if self.drop_caches {
            // Pages of files alone: dropping directories and inodes as well takes longer than it frees.
            std::fs::write("/proc/sys/vm/drop_caches", "1")?;
        }
        Ok(())
    }
}
