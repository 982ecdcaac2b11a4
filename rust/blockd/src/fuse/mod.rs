//! Serving images as files of one FUSE mount.
//!
//! An own small loop over `/dev/fuse` instead of a crate: replies are read straight into the buffer they leave from, the
//! number of threads follows the number of requests that wait for something, and one image whose origin stalls cannot take
//! the threads of the others.

mod abi;
mod buffer;
mod mount;
mod notify;
mod ops;
mod session;

pub use mount::{clean_stale, Mount};
pub use session::Session;
