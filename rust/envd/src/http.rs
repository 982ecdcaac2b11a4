//! The HTTP types every module shares, and the one streaming body.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Body as HttpBody, Frame, Incoming};
use hyper::StatusCode;
use tokio::sync::mpsc;

use crate::error::HttpError;

/// A request as hyper hands it over. [`Peer`] is in its extensions.
pub type Request = hyper::Request<Incoming>;
/// A response body: whole, or streamed from a channel. An error tears the connection, which clients see as a broken stream.
pub type Body = UnsyncBoxBody<Bytes, std::io::Error>;
/// A response.
pub type Response = hyper::Response<Body>;

/// The two ends of the connection a request came over.
#[derive(Debug, Clone, Copy)]
pub struct Peer {
    /// The client.
    pub remote: SocketAddr,
    /// The address it connected to.
    pub local: SocketAddr,
}

impl Peer {
    /// Whether the client is this machine itself.
    pub fn is_self(&self) -> bool {
        let remote = self.remote.ip().to_canonical();
        remote.is_loopback() || remote == self.local.ip().to_canonical()
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
pub async fn read_body(body: Incoming, limit: usize) -> Result<Bytes, HttpError> {
    match Limited::new(body, limit).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => {
            Err(HttpError::new(StatusCode::PAYLOAD_TOO_LARGE, format!("request body is larger than {limit} bytes")))
        }
        Err(error) => Err(HttpError::new(StatusCode::BAD_REQUEST, format!("cannot read the request body: {error}"))),
    }
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

    #[test]
    fn a_peer_that_is_the_guest_itself_is_recognised() {
        let peer = |remote: &str, local: &str| Peer {
            remote: remote.parse().expect("address"),
            local: local.parse().expect("address"),
        };
        assert!(peer("127.0.0.1:5", "127.0.0.1:49983").is_self());
        assert!(peer("169.254.0.21:5", "169.254.0.21:49983").is_self());
        assert!(peer("[::ffff:127.0.0.1]:5", "[::ffff:127.0.0.1]:49983").is_self());
        assert!(!peer("169.254.0.22:5", "169.254.0.21:49983").is_self());
    }
}
