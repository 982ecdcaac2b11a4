//! Serving images as ublk block devices, where the kernel has them.
//!
//! One thread per device takes requests from the kernel ([`queue`]) and hands them to workers shared by all devices
//! ([`pool`]), as any of them may wait for a disk or a remote origin.

mod device;
mod pool;
mod queue;

pub use device::{Device, Driver};
