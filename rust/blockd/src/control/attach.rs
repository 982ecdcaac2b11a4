//! Attaching, binding what was attached blank, and detaching.

use std::sync::Arc;
use std::time::Duration;

use overlaybd::{Image, Stack, MAX_VIRTUAL_SIZE, SECTOR};
use serde_json::{json, Map, Value};

use super::request::{Attach, Bind, Detach, Target};
use super::service::text;
use super::Service;
use crate::image::{check_name, Attached, LayerSpec, Manner, UpperDir};
use crate::{ublk, Code, Error};

/// How long a detach waits for handles to be closed: the kernel closes those of a killed VMM a while after its end.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why there is no such thing.
const BLANK_DEVICE: &str = "an image that is attached blank is always a file";

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
        let blank = blank_size(request)?;
        let wanted = self.choose(request)?;
        let place = self.table.reserve(&request.image)?;
        // The upper's directory is put in order before layers are opened: a seal that has to be undone there may have left the
        // name of a layer that never was one.
        let mut upper = request.upper.as_ref().map(UpperDir::lock).transpose()?;
        let content = match blank {
            Some(_) => None,
            None => Some(assemble(&request.image, self.layers.stack(&request.layers)?, upper.as_mut(), request.size)?),
        };
        let size = blank.or(content.as_ref().map(Image::size)).unwrap_or_default();
        let Attach { owner, shared, record, .. } = *request;
        let manner = Manner { owner, shared, record };
        let image = Arc::new(Attached::blank(&request.image, place.node(), size, upper, manner));
        if let Some(content) = content {
            image.bind(content, &request.layers)?;
        }
        let fallback = match wanted {
            Wanted::File => None,
            Wanted::FileInstead(reason) => Some(reason),
            Wanted::Device(driver) => self.start_device(driver, request, &image)?,
        };
        place.publish(image.clone());
        let mut reply = self.described(&image)?;
        if let Some(reason) = fallback {
            reply["fallback"] = reason.into();
        }
        tracing::info!(image = request.image, %reply, "attached");
        Ok(reply)
    }

    /// Gives a blank disk its layers: as if it had been attached with them.
    pub(super) fn bind(&self, request: &Bind) -> Result<Value, Error> {
        let image = self.table.require(&request.image)?;
        // Before the image is locked: the origin of a remote layer may take its time.
        let stack = self.open_for(&image, &request.layers)?;
        let mut upper = image.upper();
        if self.table.node(image.node()).is_none() {
            return Err(Error::new(Code::NotFound, format!("image {} was detached meanwhile", image.name())));
        }
        if !image.is_blank() {
            return Err(image.already_bound());
        }
        if let Some(size) = request.size.filter(|size| *size != image.size()) {
            let (name, found) = (image.name(), image.size());
            return Err(Error::invalid(format!("image {name} was attached with {found} bytes, not {size}")));
        }
        let content = assemble(image.name(), stack, upper.as_mut(), Some(image.size()))?;
        image.bind(content, &request.layers)?;
        // Mappings may have brought zeroes of a blank disk into the kernel's cache. Pages that are being read are waited for.
        self.targets.fuse.forget_content(&image);
        drop(upper);
        let reply = self.described(&image)?;
        tracing::info!(image = request.image, %reply, "bound");
        Ok(reply)
    }

    /// Opens the layers a blank disk is to get. Without them the request makes no sense, whatever is wrong with them: other
    /// codes would be of the image.
    fn open_for(&self, image: &Attached, layers: &[LayerSpec]) -> Result<Arc<Stack>, Error> {
        self.layers.stack(layers).map_err(|error| match error.code {
            Code::NotFound | Code::Corrupt => Error::invalid(format!("binding image {}: {error}", image.name())),
            _ => error,
        })
    }

    /// What is told of an image that was just attached or bound.
    fn described(&self, image: &Attached) -> Result<Value, Error> {
        let (path, target) = self.place(image.name());
        let (mut layers, mut extents) = (0, 0);
        if let Ok(image) = image.image() {
            let stack = image.stack();
            layers = stack.layers().len();
            extents = stack.extents() + image.upper().map_or(0, |upper| upper.stats().extents);
        }
        Ok(json!({"path": text(&path)?, "target": target, "size": image.size(), "layers": layers, "extents": extents}))
    }

    fn choose(&self, request: &Attach) -> Result<Wanted<'_>, Error> {
        match (request.target, &self.targets.ublk) {
            (Target::Fuse, _) => Ok(Wanted::File),
            // Only a file shares the kernel's cache of a read-only image with those who map it.
            (Target::Auto, _) if request.upper.is_none() => Ok(Wanted::File),
            // Of a block device the kernel may have cached what it read before there was anything.
            (Target::Auto, Ok(_)) if request.blank => Ok(Wanted::FileInstead(BLANK_DEVICE.to_owned())),
            (Target::Ublk, Ok(_)) if request.blank => Err(Error::new(Code::Unsupported, BLANK_DEVICE)),
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
        match image.image() {
            Ok(content) if image.is_writable() && discard => content.stack().sync().map_err(|e| Error::io(what(), &e)),
            Ok(_) if image.is_writable() => image.flush().map_err(|e| Error::io(what(), &e.into())),
            _ => Ok(()),
        }
    }
}

/// Makes an image of a stack, with the upper in a directory if there is one.
fn assemble(name: &str, stack: Arc<Stack>, upper: Option<&mut UpperDir>, size: Option<u64>) -> Result<Image, Error> {
    let what = format!("image {name}");
    if let Some(dir) = upper {
        let upper = Arc::new(dir.open(&stack, size)?);
        return Image::writable(stack, upper).map_err(|e| Error::caused(Code::Corrupt, &what, &e));
    }
    let found = stack.virtual_size();
    match size {
        _ if stack.layers().is_empty() => Err(Error::invalid(format!("{what}: no layers and no upper"))),
        Some(size) if size != found => {
            Err(Error::invalid(format!("{what}: its layers have {found} bytes, not {size}; only an upper can add")))
        }
        _ => Ok(Image::read_only(stack)),
    }
}

/// The size of a disk that is to be blank.
fn blank_size(request: &Attach) -> Result<Option<u64>, Error> {
    let what = || format!("attaching image {}", request.image);
    match request.size {
        _ if !request.blank => Ok(None),
        _ if request.upper.is_none() => {
            Err(Error::invalid(format!("{}: \"blank\" is for disks: it needs an upper", what())))
        }
        _ if !request.layers.is_empty() => {
            Err(Error::invalid(format!("{}: \"blank\" is for disks without layers; they are bound later", what())))
        }
        Some(size) if size > 0 && size % SECTOR == 0 && size <= MAX_VIRTUAL_SIZE => Ok(Some(size)),
        size => {
            let size = size.map_or_else(|| "none".to_owned(), |size| size.to_string());
            Err(Error::invalid(format!(
                "{}: a blank disk needs a size, in whole sectors of 512 bytes, not {size}",
                what()
            )))
        }
    }
}
