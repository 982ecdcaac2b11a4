//! Where the bytes of a remote layer come from: HTTP(S) range requests.
//!
//! An [`HttpOrigin`] is one immutable object behind a URL. It is asked for ranges and pushes the bytes into a [`Sink`] as
//! they arrive, so that a large range needs no large buffer. What it takes care of:
//!
//! * each response is what was asked for: `206` with exactly the range and the declared total, or `200` with the whole
//!   object from an origin that ignores ranges ([`check`]);
//! * the object is the same one as at first contact (`ETag`, `Last-Modified`);
//! * connection errors, stalls, broken bodies, `408`, `429` and `5xx` are retried with exponential back-off and jitter
//!   from the byte that is missing ([`retry`]), within a time budget that restarts whenever bytes arrive at a fair pace;
//! * `401` and `403` ask [`Credentials`] for new headers, once for all requests that met them ([`credentials`]);
//! * redirects are bounded, never go from HTTPS to HTTP, and take no caller's header to another host ([`redirect`]).
//!
//! Only addresses given by the control plane are contacted, and what they redirect to.

mod asking;
mod check;
mod credentials;
mod error;
mod object;
mod redirect;
mod retry;
mod transport;

pub use asking::AskingCredentials;
pub use check::Validator;
pub use credentials::{Credentials, Headers, NoCredentials, RefreshFuture};
pub use error::{OriginError, SharedError};
pub use object::{HttpOrigin, Lane, OriginStats, Sink};
pub use transport::Transport;

use std::time::Duration;

/// How patient an origin is. The defaults fit object stores and registries over the Internet.
#[derive(Debug, Clone)]
pub struct OriginOptions {
    /// For the TCP connection.
    pub connect_timeout: Duration,
    /// Longest silence: waiting for a response's head, or for the next bytes of its body.
    pub stall_timeout: Duration,
    /// Time in which each [`OriginOptions::pace`] bytes must arrive, waits and retries included.
    pub budget: Duration,
    /// Bytes that start a new budget.
    pub pace: u64,
    /// Tries without a single new byte before giving up.
    pub attempts: u32,
    /// Pause before the first retry; each further one doubles it, and each is drawn between half of it and the whole.
    pub backoff: Duration,
    /// Longest pause between tries.
    pub backoff_max: Duration,
    /// How long new credentials are waited for.
    pub refresh_timeout: Duration,
    /// Requests on the wire for readers that wait, per origin.
    pub demand_requests: usize,
    /// Requests on the wire for read-ahead, prefetch and completion, per origin.
    pub background_requests: usize,
}

impl Default for OriginOptions {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            stall_timeout: Duration::from_secs(10),
            budget: Duration::from_secs(60),
            pace: 256 * 1024,
            attempts: 6,
            backoff: Duration::from_millis(100),
            backoff_max: Duration::from_secs(5),
            refresh_timeout: Duration::from_secs(15),
            demand_requests: 8,
            background_requests: 4,
        }
    }
}
