//! Attaching and detaching.

use std::sync::Arc;
use std::time::Duration;

use overlaybd::Image;
use serde_json::{json, Map, Value};

use super::request::{Attach, Detach, Target};
use super::service::text;
use super::Service;
use crate::image::{check_name, Attached, UpperDir};
use crate::{ublk, Code, Error};

/// How long a detach waits for handles to be closed: the kernel closes those of a killed VMM a while after its end.
const PATIENCE: Duration = Duration::from_secs(5);

/// How an image is to be served.
enum Wanted<'a> {
    File,
    /// A file although a block device was looked for, and why.
    FileInstead(String),
    Device(&'a ublk::Driver),
}

impl Service {
    pub(super) fn attach(&self, request: &Attach) -> Result<Value, Error> {
        check_name(&request.image)?;
        if request.shared && request.upper.is_some() {
            return Err(Error::invalid(format!("image {}: \"shared\" is for images without an upper", request.image)));
        }
        let wanted = self.choose(request)?;
        let place = self.table.reserve(&request.image)?;
        let (image, upper) = self.open(request)?;
        let extents = image.stack().extents() + image.upper().map_or(0, |upper| upper.stats().extents);
        let (size, layers) = (image.size(), image.stack().layers().len());
        let Attach { owner, shared, record, .. } = *request;
        let image = Arc::new(Attached::new(&request.image, place.node(), image, upper, owner, shared, record));
        for (layer, spec) in image.image().stack().layers().iter().zip(&request.layers) {
            if let Some(path) = &spec.path {
                image.note_file(layer, path);
            }
        }
        let fallback = match wanted {
            Wanted::File => None,
            Wanted::FileInstead(reason) => Some(reason),
            Wanted::Device(driver) => self.start_device(driver, request, &image)?,
        };
        place.publish(image);
        let (path, target) = self.place(&request.image);
        tracing::info!(image = request.image, size, layers, extents, target, fallback, "attached");
        let mut reply =
            json!({"path": text(&path)?, "target": target, "size": size, "layers": layers, "extents": extents});
        if let Some(reason) = fallback {
            reply["fallback"] = reason.into();
        }
        Ok(reply)
    }

    /// Opens the image itself. The upper's directory is put in order first: a seal that has to be undone there may have left
    /// the name of a layer that never was one.
    fn open(&self, request: &Attach) -> Result<(Image, Option<UpperDir>), Error> {
        let what = format!("attaching image {}", request.image);
        let Some(spec) = &request.upper else {
            let stack = self.layers.stack(&request.layers)?;
            return match request.size {
                _ if request.layers.is_empty() => Err(Error::invalid(format!("{what}: no layers and no upper"))),
                Some(size) if size != stack.virtual_size() => {
                    let found = stack.virtual_size();
                    Err(Error::invalid(format!(
                        "{what}: its layers have {found} bytes, not {size}; only an upper can add"
                    )))
                }
                _ => Ok((Image::read_only(stack), None)),
            };
        };
        let mut dir = UpperDir::lock(spec)?;
        let stack = self.layers.stack(&request.layers)?;
        let upper = Arc::new(dir.open(&stack, request.size)?);
        let image = Image::writable(stack, upper).map_err(|e| Error::caused(Code::Corrupt, &what, &e))?;
        Ok((image, Some(dir)))
    }

    fn choose(&self, request: &Attach) -> Result<Wanted<'_>, Error> {
        match (request.target, &self.targets.ublk) {
            (Target::Fuse, _) => Ok(Wanted::File),
            // Only a file shares the kernel's cache of a read-only image with those who map it.
            (Target::Auto, _) if request.upper.is_none() => Ok(Wanted::File),
            (Target::Auto, Err(reason)) => Ok(Wanted::FileInstead(reason.clone())),
            (Target::Ublk, Err(reason)) => Err(Error::new(Code::Unsupported, format!("no ublk: {reason}"))),
            (_, Ok(driver)) => Ok(Wanted::Device(driver)),
        }
    }

    /// Starts a block device; gives why there is none if FUSE will do instead.
    fn start_device(
        &self,
        driver: &ublk::Driver,
        request: &Attach,
        image: &Arc<Attached>,
    ) -> Result<Option<String>, Error> {
        match driver.start(image.clone()) {
            Ok(device) => {
                self.devices().insert(request.image.clone(), device);
                Ok(None)
            }
            Err(error) if request.target == Target::Auto => {
                tracing::warn!(image = request.image, %error, "no block device; serving a file instead");
                Ok(Some(error.message))
            }
            Err(error) => Err(error),
        }
    }

    pub(super) fn detach(&self, request: &Detach) -> Result<Value, Error> {
        let image = self.table.require(&request.image)?;
        let mut upper = image.upper();
        image.handles().close(PATIENCE).map_err(|open| {
            let name = image.name();
            Error::new(Code::Busy, format!("image {name} is open {open} times; end what uses it and detach again"))
        })?;
        if let Err(error) = self.stop(&image, request.discard_upper) {
            image.handles().reopen();
            return Err(error);
        }
        let place = self.table.take(&image)?;
        self.targets.fuse.forget(&image);
        if let Some(mut dir) = upper.take() {
            dir.wait_for_seals();
            let names = dir.names();
            let discarded = if request.discard_upper { dir.discard() } else { Ok(()) };
            names.unlock();
            discarded?;
        }
        drop(place);
        tracing::info!(image = image.name(), "detached");
        Ok(Value::Object(Map::new()))
    }

    /// Ends the block device, if there is one, and brings what must stay to stable storage.
    fn stop(&self, image: &Attached, discard: bool) -> Result<(), Error> {
        let what = || format!("detaching image {}", image.name());
        let device = self.devices().remove(image.name());
        if let Some(device) = device {
            if device.is_claimed() {
                let message = format!("{}: {} is mounted or held", what(), device.path().display());
                self.devices().insert(image.name().to_owned(), device);
                return Err(Error::new(Code::Busy, message));
            }
            device.stop()?;
        }
        match (image.is_writable(), discard) {
            (false, _) => Ok(()),
            (true, false) => image.flush().map_err(|e| Error::io(what(), &e.into())),
            (true, true) => image.image().stack().sync().map_err(|e| Error::io(what(), &e)),
        }
    }
}
