//! Serving images as ublk block devices.

use std::path::Path;
use std::sync::Arc;

use crate::image::Attached;
use crate::Error;

/// The kernel's ublk driver.
pub enum Driver {}

/// One block device.
pub enum Device {}

impl Driver {
    /// Finds the driver, or says why it cannot be used.
    ///
    /// # Errors
    /// The reason, for people.
    pub fn probe() -> Result<Self, String> {
        Err("not built in".into())
    }

    /// Makes a block device of an image.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn start(&self, _image: Arc<Attached>) -> Result<Device, Error> {
        match *self {}
    }
}

impl Device {
    /// The device node.
    pub fn path(&self) -> &Path {
        match *self {}
    }

    /// Ends the device.
    ///
    /// # Errors
    /// It is in use.
    pub fn stop(self) -> Result<(), Error> {
        match self {}
    }
}
