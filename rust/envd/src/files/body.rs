//! Reading an upload's body as it arrives.

use std::fmt::Display;
use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::StatusCode;
use tokio::time::timeout;

use crate::error::HttpError;
use crate::http::RequestBody;

/// An upload that sends nothing for so long has been abandoned. Above the pauses of a client that produces what it sends.
const IDLE: Duration = Duration::from_secs(300);

/// The data of one file, piece by piece.
pub trait Pieces: Send {
    /// The next bytes, or `None` at the end.
    fn piece(&mut self) -> impl Future<Output = Result<Option<Bytes>, HttpError>> + Send;
}

impl Pieces for &mut BodyReader<RequestBody> {
    async fn piece(&mut self) -> Result<Option<Bytes>, HttpError> {
        self.next().await
    }
}

/// A request body, piece by piece.
pub struct BodyReader<B> {
    body: B,
}

impl<B> BodyReader<B>
where
    B: hyper::body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Display,
{
    /// Reads `body`.
    pub fn new(body: B) -> Self {
        Self { body }
    }

    /// The next bytes, or `None` at the end.
    ///
    /// # Errors
    /// 400 when the client broke off, 408 when it sent nothing for five minutes.
    pub async fn next(&mut self) -> Result<Option<Bytes>, HttpError> {
        loop {
            let frame = timeout(IDLE, self.body.frame()).await.map_err(|_| {
                HttpError::new(StatusCode::REQUEST_TIMEOUT, format!("nothing was sent for {} s", IDLE.as_secs()))
            })?;
            match frame {
                None => return Ok(None),
                Some(Err(error)) => {
                    let message = format!("the request body broke off: {error}");
                    return Err(HttpError::new(StatusCode::BAD_REQUEST, message));
                }
                // Trailers are not data.
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(bytes) if !bytes.is_empty() => return Ok(Some(bytes)),
                    _ => {}
                },
            }
        }
    }
}
