//! Serving images as ublk block devices.
