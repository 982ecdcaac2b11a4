//! The HTTP types every module shares, and the one streaming body.

use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::StatusCode;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::{timeout_at, Instant};

use crate::error::HttpError;

/// How much of an unwanted body is read and thrown away, and for how long. Clients that read while they send know better; for
/// the others it is what they push through in a few seconds.
const MAX_DRAIN_BYTES: usize = 64 << 20;
const MAX_DRAIN_TIME: Duration = Duration::from_secs(10);

/// A request. [`Peer`] is in its extensions.
pub type Request = hyper::Request<RequestBody>;
/// A response body: whole, or streamed from a channel. An error tears the connection, which clients see as a broken stream.
pub type Body = UnsyncBoxBody<Bytes, std::io::Error>;
/// A response.
pub type Response = hyper::Response<Body>;

/// The client a request came from.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub IpAddr);

/// The body of a request. Dropped before its end it is read on and thrown away, within limits, while the answer is on its way:
/// dropping a body that is still coming resets the connection, and the client, or a proxy between, may then never see the answer
/// that says why.
#[derive(Debug)]
pub struct RequestBody(Option<Incoming>);

impl RequestBody {
    /// Takes the body over from hyper.
    pub fn new(body: Incoming) -> Self {
        Self(Some(body))
    }
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let Some(body) = &mut self.0 else { return Poll::Ready(None) };
        let polled = Pin::new(body).poll_frame(cx);
        if let Poll::Ready(None | Some(Err(_))) = polled {
            self.0 = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.0.as_ref().map_or_else(SizeHint::default, HttpBody::size_hint)
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        let Some(mut body) = self.0.take().filter(|body| !body.is_end_stream()) else { return };
        let Ok(runtime) = Handle::try_current() else { return };
        runtime.spawn(async move {
            let deadline = Instant::now() + MAX_DRAIN_TIME;
            let mut left = MAX_DRAIN_BYTES;
            while let Ok(Some(Ok(frame))) = timeout_at(deadline, body.frame()).await {
                let Some(remaining) = left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) else { return };
                left = remaining;
            }
        });
    }
}

/// Marks the connection that brings news of a new generation; unlike all others it is kept, to be answered on.
#[derive(Debug, Clone, Default)]
pub struct Survivor(Arc<AtomicBool>);

impl Survivor {
    /// Keeps this connection through the next change.
    pub fn mark(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether it was marked; the mark is used up.
    pub fn take(&self) -> bool {
        self.0.swap(false, Ordering::AcqRel)
    }
}

/// A body that is already complete.
pub fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never: Infallible| match never {}).boxed_unsync()
}

/// A response with this status and no body.
pub fn empty(status: StatusCode) -> Response {
    let mut response = Response::new(full(Bytes::new()));
    *response.status_mut() = status;
    response
}

/// A streamed body: what the sender sends, until it is dropped. Dropping the sender is a clean end; sending an error tears
/// the connection. The sender's `closed()` resolves when the client has gone.
pub fn channel(capacity: usize) -> (mpsc::Sender<std::io::Result<Bytes>>, Body) {
    let (sender, receiver) = mpsc::channel(capacity);
    (sender, ChannelBody { receiver }.boxed_unsync())
}

struct ChannelBody {
    receiver: mpsc::Receiver<std::io::Result<Bytes>>,
}

impl HttpBody for ChannelBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.receiver.poll_recv(cx).map(|item| item.map(|result| result.map(Frame::data)))
    }
}

/// Reads a whole request body.
///
/// # Errors
/// 413 when it is longer than `limit` bytes, 400 when the client broke it off.
pub async fn read_body(mut body: RequestBody, limit: usize) -> Result<Bytes, HttpError> {
    let mut bytes = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            HttpError::new(StatusCode::BAD_REQUEST, format!("cannot read the request body: {error}"))
        })?;
        let data = frame.into_data().unwrap_or_default();
        if data.len() > limit - bytes.len() {
            let message = format!("request body is larger than {limit} bytes");
            return Err(HttpError::new(StatusCode::PAYLOAD_TOO_LARGE, message));
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes.freeze())
}

/// The decoded value of query parameter `name`, or `None`. `+` is a space, as in forms; a malformed escape is kept as is.
pub fn query_param(query: Option<&str>, name: &str) -> Option<String> {
    let decode = |text: &str| {
        let spaced = text.replace('+', " ");
        percent_encoding::percent_decode_str(&spaced).decode_utf8_lossy().into_owned()
    };
    query?.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decode(key) == name).then(|| decode(value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_parameters_are_decoded() {
        let query = Some("path=%2Ftmp%2Fa+b&username=&x");
        assert_eq!(query_param(query, "path").as_deref(), Some("/tmp/a b"));
        assert_eq!(query_param(query, "username").as_deref(), Some(""));
        assert_eq!(query_param(query, "x").as_deref(), Some(""));
        assert_eq!(query_param(query, "nope"), None);
        assert_eq!(query_param(None, "path"), None);
    }
}
