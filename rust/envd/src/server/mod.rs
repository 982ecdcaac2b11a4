//! The HTTP server: accepts connections and routes requests.

mod configure;
mod greeting;
pub mod hold;
pub mod metrics;
mod router;
mod sync;

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

pub use configure::rehearse;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::unix::AsyncFd;
use tokio::io::Interest;

use crate::http::{Peer, RequestBody, Survivor};
use crate::log;
use crate::state::State;

/// Largest request head, in bytes; hyper's own minimum is 8 KiB. Signed URLs and X-Metadata headers fit easily.
const MAX_HEAD: usize = 64 << 10;

/// Pause after a failed accept (too many open files), so that it does not spin.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// Accepts connections for ever. Idle connections are kept as long as the client keeps them: a server that closes first races
/// with the client's next request.
///
/// # Errors
/// When the listener cannot be waited for.
pub async fn serve(listener: TcpListener, state: Arc<State>) -> io::Result<Infallible> {
    greeting::expect_words(&listener)?;
    // SAFETY: the listener moves in, nothing else closes or replaces it, and it stays registered until the drop.
    let listener = unsafe { AsyncFd::register_with_interest(listener, Interest::READABLE) }?;
    let mut buffer = vec![0; greeting::MAX_REQUEST];
    loop {
        match listener.async_io(Interest::READABLE, TcpListener::accept).await {
            Ok((stream, remote)) => {
                let remote = remote.ip().to_canonical();
                if let Some(stream) = greeting::answer(stream, remote, &state, &mut buffer) {
                    tokio::spawn(connection(stream, remote, state.clone()));
                }
            }
            Err(error) => {
                log!("cannot accept a connection: {error}");
                tokio::time::sleep(ACCEPT_BACKOFF).await;
            }
        }
    }
}

/// Serves one connection until the client closes it, or until the guest has become another one: after a resume or a fork the
/// other end is gone, and without this a stream on it would count as a reader that never reads.
async fn connection(stream: TcpStream, remote: IpAddr, state: Arc<State>) {
    let stream = stream.set_nonblocking(true).and_then(|()| tokio::net::TcpStream::from_std(stream));
    let Ok(stream) = stream else { return };
    let mut epoch = state.epoch.subscribe();
    let survivor = Survivor::default();
    let _ = stream.set_nodelay(true);
    let mark = survivor.clone();
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let mut request = request.map(RequestBody::new);
        request.extensions_mut().insert(Peer(remote));
        request.extensions_mut().insert(mark.clone());
        let state = state.clone();
        async move { Ok::<_, Infallible>(router::route(request, state).await) }
    });
    let mut serving = std::pin::pin!(hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(None)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), service));
    loop {
        tokio::select! {
            // A broken connection concerns only its client, which already knows.
            _ = &mut serving => return,
            _ = epoch.changed() => if !survivor.take() { return },
        }
    }
}
