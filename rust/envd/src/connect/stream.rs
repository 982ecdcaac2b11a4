//! Server and client streams.

use std::future::Future;
use std::marker::PhantomData;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::header::{HeaderValue, CONTENT_TYPE};
use serde::de::DeserializeOwned;
use serde::Serialize;
use tokio::sync::{mpsc, Notify};

use super::budget::{Share, FREE};
use super::{decode, envelope, next_data, require_content_type, require_identity, with_deadline, Call, MAX_MESSAGE};
use crate::error::RpcError;
use crate::http::{channel, full, Request, RequestBody, Response};

const STREAM_TYPE: &str = "application/connect+json";

/// Messages handed to the connection but not yet taken by it. One, so that a slow client is felt at once.
const QUEUE: usize = 1;

/// Where the handler of a server stream puts its messages.
pub struct EventSink {
    sender: mpsc::Sender<std::io::Result<Bytes>>,
    started: Notify,
}

impl EventSink {
    /// Sends one message; waits until the connection has taken it, which a slow client delays. Returns whether the client is
    /// still there.
    pub async fn send(&self, message: &impl Serialize) -> bool {
        self.send_frame(envelope::encode(envelope::MESSAGE, message)).await
    }

    /// Sends an already encoded frame, like [`EventSink::send`].
    pub async fn send_frame(&self, frame: Bytes) -> bool {
        let queued = self.sender.send(Ok(frame)).await.is_ok();
        self.started.notify_one();
        // With a queue of one, room for another message means that this one has left it.
        queued && self.sender.reserve().await.is_ok()
    }
}

/// Serves a server stream: decodes the one request message as `I`, then runs the handler, which sends messages to the sink.
///
/// The stream always ends with an end-of-stream message: clean when the handler returns `Ok`, else with its error; with
/// `deadline_exceeded` when the call's timeout passes first. The handler's future is dropped at the timeout and when the client
/// goes away, so what must outlive the stream belongs elsewhere. `keepalive` is sent once per interval, after the first message.
pub async fn server_stream<I, K, F, Fut>(request: Request, keepalive: K, handler: F) -> Response
where
    I: DeserializeOwned,
    K: Serialize + Send + Sync + 'static,
    F: FnOnce(Call, I, std::sync::Arc<EventSink>) -> Fut,
    Fut: Future<Output = Result<(), RpcError>> + Send + 'static,
{
    let (parts, body) = request.into_parts();
    if let Err(response) = require_content_type(&parts.headers, STREAM_TYPE) {
        return *response;
    }
    let opened = async {
        require_identity(&parts.headers, "connect-content-encoding")?;
        let call = Call::parse(&parts.headers)?;
        let mut source = MessageSource::<I>::new(body);
        let input = source.next().await?;
        let input = input.ok_or_else(|| RpcError::invalid_argument("the request stream has no message"))?;
        source.expect_end().await?;
        Ok((call, input, source.share))
    };
    let (call, input, share) = match opened.await {
        Ok(opened) => opened,
        Err(error) => return ended(envelope::encode_end(Some(&error))),
    };

    let (sender, body) = channel(QUEUE);
    let sink = std::sync::Arc::new(EventSink { sender: sender.clone(), started: Notify::new() });
    let (interval, timeout) = (call.keepalive, call.timeout);
    let work = handler(call, input, sink.clone());
    tokio::spawn(async move {
        let keepalives = async {
            sink.started.notified().await;
            // A stream may last for days; what its request asked for has been done.
            drop(share);
            let frame = envelope::encode(envelope::MESSAGE, &keepalive);
            loop {
                tokio::time::sleep(interval).await;
                if sink.sender.send(Ok(frame.clone())).await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        let outcome = tokio::select! {
            biased;
            outcome = with_deadline(timeout, work) => outcome,
            () = sender.closed() => return,
            () = keepalives => return,
        };
        let _ = sender.send(Ok(envelope::encode_end(outcome.err().as_ref()))).await;
    });
    stream_response(body)
}

/// Serves a client stream: the handler reads messages from the source and returns the one answer.
pub async fn client_stream<I, O, F, Fut>(request: Request, handler: F) -> Response
where
    I: DeserializeOwned,
    O: Serialize,
    F: FnOnce(Call, MessageSource<I>) -> Fut,
    Fut: Future<Output = Result<O, RpcError>>,
{
    let (parts, body) = request.into_parts();
    if let Err(response) = require_content_type(&parts.headers, STREAM_TYPE) {
        return *response;
    }
    let outcome = async {
        require_identity(&parts.headers, "connect-content-encoding")?;
        let call = Call::parse(&parts.headers)?;
        let timeout = call.timeout;
        with_deadline(timeout, handler(call, MessageSource::new(body))).await
    };
    match outcome.await {
        Ok(output) => {
            let frames = [envelope::encode(envelope::MESSAGE, &output), envelope::encode_end(None)].concat();
            ended(Bytes::from(frames))
        }
        Err(error) => ended(envelope::encode_end(Some(&error))),
    }
}

fn ended(frames: Bytes) -> Response {
    stream_response(full(frames))
}

fn stream_response(body: crate::http::Body) -> Response {
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(STREAM_TYPE));
    response
}

/// The messages of a request stream, decoded one at a time; holds at most one message and one read of the connection.
pub struct MessageSource<I> {
    body: RequestBody,
    buffer: BytesMut,
    /// Of the message that is coming or was returned last.
    share: Share,
    ended: bool,
    message: PhantomData<fn() -> I>,
}

impl<I: DeserializeOwned> MessageSource<I> {
    fn new(body: RequestBody) -> Self {
        Self { body, buffer: BytesMut::new(), share: Share::default(), ended: false, message: PhantomData }
    }

    /// The next message; `None` at the end of the stream.
    ///
    /// # Errors
    /// `invalid_argument` when the framing or the JSON is malformed or the stream ends inside a message,
    /// `resource_exhausted` when a message is longer than [`MAX_MESSAGE`] or there are too many large ones,
    /// `deadline_exceeded` when one is not sent to its end.
    pub async fn next(&mut self) -> Result<Option<I>, RpcError> {
        self.share = Share::default();
        match self.next_frame().await? {
            Some(bytes) => {
                self.share.add_strings(&bytes)?;
                decode(&bytes).map(Some)
            }
            None => Ok(None),
        }
    }

    async fn next_frame(&mut self) -> Result<Option<Bytes>, RpcError> {
        loop {
            if self.ended {
                return Ok(None);
            }
            if let Some((flags, message)) = envelope::decode(&mut self.buffer, MAX_MESSAGE)? {
                if message.len() > FREE {
                    // Else what is left of the buffer would keep the message's memory.
                    self.buffer = BytesMut::from(&self.buffer[..]);
                }
                if flags & envelope::END_STREAM == 0 {
                    return Ok(Some(message));
                }
                self.ended = true;
                continue;
            }
            let data = match envelope::length(&self.buffer) {
                // Between messages there is no hurry.
                None => match self.body.frame().await.transpose() {
                    Ok(frame) => frame.map(|frame| frame.into_data().unwrap_or_default()),
                    Err(error) => return Err(RpcError::invalid_argument(format!("cannot read the request: {error}"))),
                },
                Some(length) => {
                    if length > FREE && self.share.bytes() < length {
                        self.share = Share::of(length).await?;
                    }
                    self.buffer.reserve(length - self.buffer.len());
                    next_data(&mut self.body).await?
                }
            };
            match data {
                Some(data) => self.buffer.extend_from_slice(&data),
                None if self.buffer.is_empty() => self.ended = true,
                None => return Err(RpcError::invalid_argument("malformed envelope: the stream ends inside a message")),
            }
        }
    }

    /// Reads the stream to its end; hyper notices a client that goes away only after the request is read.
    async fn expect_end(&mut self) -> Result<(), RpcError> {
        match self.next_frame().await? {
            None => Ok(()),
            Some(_) => Err(RpcError::invalid_argument("the request stream has more than one message")),
        }
    }
}
