//! `envd`: the init process and the daemon of an AgentENV sandbox.
//!
//! One process in the guest serves port 49983: processes, files, watches, health, metrics. As PID 1 it first makes the
//! initramfs into a running Linux userland ([`init`]).

pub mod auth;
pub mod connect;
pub mod error;
pub mod files;
pub mod filesystem;
pub mod http;
pub mod init;
pub mod log;
pub mod machine;
pub mod memory;
pub mod paths;
pub mod process;
pub mod reaper;
pub mod server;
pub mod state;
pub mod users;

/// What `--version` prints and clients see as `envdVersion`.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
