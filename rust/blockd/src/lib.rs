//! The data plane of AgentENV.
//!
//! An *image* is a stack of overlaybd layers with at most one writable upper (crate [`overlaybd`]). This daemon attaches
//! images by name and serves each as a path: a file in one FUSE mount, or a ublk block device.
//!
//! * [`control`] speaks newline-delimited JSON on a Unix socket (`docs/formats/blockd-control.md`).
//! * [`image`] holds the attached images and what can be done with them: seal, compact, import, export.
//! * [`fuse`] and [`ublk`] serve them.
//! * [`origin`] and [`cache`] fetch remote layers.
//! * [`capture`] makes layers of guest memory, [`restore`] writes what layers hold into it.

pub mod cache;
pub mod capture;
pub mod control;
pub mod daemon;
pub mod error;
pub mod fuse;
pub mod image;
pub mod memory;
pub mod origin;
pub mod privileges;
pub mod restore;
pub mod ublk;

pub use error::{Code, Error};
