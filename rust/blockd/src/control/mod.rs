//! The control socket: newline-delimited JSON.
