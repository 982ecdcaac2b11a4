//! What the operations work on.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{json, Value};

use crate::control::{Events, Op};
use crate::fuse;
use crate::image::{Layers, Table};
use crate::ublk;
use crate::{Code, Error};

/// Where images are served.
pub struct Targets {
    /// The FUSE mount.
    pub mount: PathBuf,
    /// Its session.
    pub fuse: Arc<fuse::Session>,
    /// Block devices, or why there are none.
    pub ublk: Result<ublk::Driver, String>,
}

/// The attached images, their layers, and where they are served. Operations block; any number may run at once.
pub struct Service {
    pub(super) table: Arc<Table>,
    pub(super) layers: Arc<Layers>,
    pub(super) targets: Targets,
    events: Arc<Events>,
    /// Block devices by image.
    devices: Mutex<HashMap<String, ublk::Device>>,
}

impl Service {
    /// Nothing attached yet.
    pub fn new(table: Arc<Table>, layers: Arc<Layers>, targets: Targets, events: Arc<Events>) -> Self {
        Self { table, layers, targets, events, devices: Mutex::default() }
    }

    /// Carries out one operation.
    ///
    /// # Errors
    /// As the operation's documentation says.
    pub fn run(&self, op: Op) -> Result<Value, Error> {
        match op {
            Op::Version => Ok(self.version()),
            Op::Attach(request) => self.attach(&request),
            Op::Bind(request) => self.bind(&request),
            Op::Detach(request) => self.detach(&request),
            Op::Seal(request) => self.seal(&request),
            Op::Compact(request) => self.compact(&request),
            Op::Import(request) => self.import(&request),
            Op::Export(request) => self.export(&request),
            Op::Capture(request) => self.capture(*request),
            Op::WorkingSet(request) => self.save_working_set(&request),
            Op::Prefetch(request) => self.prefetch(&request),
            Op::Restore(request) => self.restore(request),
            Op::Stat(request) => self.stat(&request.image),
            Op::List => Ok(self.list()),
            Op::CacheStat => self.layers.sources().cache_stat(),
            Op::Credentials(request) => {
                let layers = self.layers.sources().credentials(&request.url, &request.headers)?;
                Ok(json!({"layers": layers}))
            }
            // Carried out by the connection.
            Op::Subscribe | Op::Proceed(_) => Ok(Value::Object(serde_json::Map::new())),
        }
    }

    /// Ends all block devices and brings all writes to stable storage, as far as possible: before the daemon ends.
    pub fn end(&self) {
        self.devices().clear();
        for image in self.table.after(0).into_iter().filter(|image| image.is_writable()) {
            if let Err(error) = image.flush() {
                tracing::error!(image = image.name(), %error, "the last flush failed");
            }
        }
    }

    /// Who wants to hear of events.
    pub fn events(&self) -> &Events {
        &self.events
    }

    pub(super) fn devices(&self) -> MutexGuard<'_, HashMap<String, ublk::Device>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where an image is served, and how.
    pub(super) fn place(&self, name: &str) -> (PathBuf, &'static str) {
        match self.devices().get(name) {
            Some(device) => (device.path().to_owned(), "ublk"),
            None => (self.targets.mount.join(name), "fuse"),
        }
    }
}

/// A path as JSON text.
pub(super) fn text(path: &Path) -> Result<Value, Error> {
    match path.to_str() {
        Some(text) => Ok(text.into()),
        None => Err(Error::new(Code::Invalid, format!("path {} is not UTF-8", path.display()))),
    }
}
