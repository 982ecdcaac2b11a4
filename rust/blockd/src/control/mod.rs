//! The control socket: newline-delimited JSON. See `docs/formats/blockd-control.md`.

mod attach;
mod connection;
mod events;
mod ops;
mod remote;
mod request;
mod restore;
mod server;
mod service;
mod stages;
mod stat;

pub use events::Events;
pub use remote::Sources;
pub use request::Op;
pub use server::Server;
pub use service::{Service, Targets};
