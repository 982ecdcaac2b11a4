//! Serving images as files of one FUSE mount.
