//! The snapshot of a live disk.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use overlaybd::{Digest, Layer};

use crate::image::files;
use crate::image::spec::check_path;
use crate::image::{Attached, Layers};
use crate::{Code, Error};

/// Stack of the thread that waits for the disk.
const STACK: usize = 128 << 10;

/// A layer that was an upper a moment ago.
pub struct Sealed {
    /// Its file.
    pub path: PathBuf,
    /// Bytes of the file.
    pub bytes: u64,
    /// Entries of its index.
    pub extents: usize,
    layer: Arc<Layer>,
    /// What is kept until the layer is on stable storage.
    keep: [PathBuf; 2],
}

/// Turns the upper of an image into the layer file `path`, and goes on with a new, empty upper.
///
/// Only names and the index are written. Nothing has to reach the disk for that: until [`Sealed::finish`] has seen to it, the
/// upper's index log is kept, from which the layer can be made again.
///
/// # Errors
/// [`Code::Invalid`] if the image is read-only or `path` is on another file system than the upper, [`Code::Exists`] if there is
/// such a file, [`Code::NoSpace`] and others; the image then goes on with the upper it had.
pub fn seal(image: &Attached, path: &Path, layers: &Layers) -> Result<Sealed, Error> {
    check_path(path)?;
    let what = format!("sealing image {} as {}", image.name(), path.display());
    let failed = |e: io::Error| match e.kind() {
        io::ErrorKind::CrossesDevices => {
            Error::invalid(format!("{what}: the layer must be on the file system of the upper's directory"))
        }
        _ => Error::io(&what, &e),
    };
    let mut guard = image.upper();
    let live = image.image()?;
    let (Some(dir), Some(upper)) = (guard.as_mut(), live.upper()) else {
        return Err(Error::invalid(format!("{what}: the image has no upper")));
    };
    let (n, next) = (dir.current, dir.current + 1);
    let (data, link) = (dir.data(n), dir.link(n));
    let new = Arc::new(dir.create(next, image.size(), upper.info().uuid)?);

    // The layer's name, and a note where it is, come before there is a layer: after a kill, `N.data` tells
    // that both mean nothing yet.
    let named = std::os::unix::fs::symlink(path, &link).and_then(|()| std::fs::hard_link(&data, path));
    let sealed = named.map_err(failed).and_then(|()| {
        let sealed = live.seal_and_continue(new);
        sealed.map_err(|e| {
            if let Err(error) = files::remove(path) {
                tracing::warn!(layer = %path.display(), %error, "the file of a layer that was not sealed stays");
            }
            Error::caused(Code::Io, &what, &e)
        })
    });
    let layer = match sealed {
        Ok(layer) => layer,
        Err(error) => {
            for undone in [files::remove(&link), dir.remove_upper(next)] {
                undone.unwrap_or_else(|error| tracing::warn!(%error, "{what}: cleaning up failed"));
            }
            return Err(error);
        }
    };
    dir.current = next;
    // This makes it a fact.
    files::remove(&data).map_err(failed)?;
    dir.names().changed();
    layers.adopt(path, &layer);
    image.note_file(&layer, path);
    let extents = upper.stats().extents;
    let bytes = path.metadata().map_err(failed)?.size();
    Ok(Sealed { path: path.to_owned(), bytes, extents, layer, keep: [dir.index(n), link] })
}

/// Brings a sealed layer to stable storage in the background. Detaching the image waits for it.
pub fn finish_later(image: &Attached, sealed: Sealed) {
    let finish = move || {
        if let Err(error) = sealed.finish() {
            tracing::warn!("{error}");
        }
    };
    let started = std::thread::Builder::new().name("seal".into()).stack_size(STACK).spawn(finish);
    match (started, &mut *image.upper()) {
        (Ok(thread), Some(dir)) => dir.finishing(thread),
        (Ok(_), None) => {}
        (Err(error), _) => tracing::warn!(%error, "a sealed layer reaches stable storage with the next flush only"),
    }
}

impl Sealed {
    /// Brings the layer to stable storage and removes what was kept until then.
    ///
    /// # Errors
    /// The file system failed. Nothing is lost; the next attaching of the upper tries again.
    pub fn finish(&self) -> Result<(), Error> {
        let finished = || -> io::Result<()> {
            self.layer.sync()?;
            files::sync_parent(&self.path)?;
            self.keep.iter().try_for_each(|path| files::remove(path))
        };
        let what = || format!("bringing layer {} to stable storage", self.path.display());
        finished().map_err(|e| Error::io(what(), &e))
    }

    /// The digest of the layer file.
    ///
    /// # Errors
    /// Reading it failed.
    pub fn digest(&self) -> Result<Digest, Error> {
        overlaybd::sha256(&**self.layer.source())
            .map_err(|e| Error::io(format_args!("reading layer {}", self.path.display()), &e))
    }
}
