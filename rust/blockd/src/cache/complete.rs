//! Making a remote layer whole: all bytes read once, compared with the digest, and from then on local.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use overlaybd::{sha256, Digest, DigestWriter, FileSource};

use super::layer::CachedLayer;
use super::layout::BLOCK;
use crate::origin::Lane;

/// Why a layer could not be made whole.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum CompleteError {
    /// the layer's bytes have digest sha256:{found}, not the declared sha256:{declared}
    Digest {
        /// As the attach request says.
        declared: Digest,
        /// Of the bytes the origin sent.
        found: Digest,
    },
    /// {0} is being assembled already
    Busy(PathBuf),
    /// nobody wants the layer whole any more
    Unwanted,
    /// reading the layer failed
    Read(#[source] io::Error),
    /// writing {0} failed
    Write(PathBuf, #[source] io::Error),
}

impl CachedLayer {
    /// Reads the whole layer (what is cached from the cache, the rest from the origin), compares its digest, and, if it has
    /// a path, publishes it there: a temporary file beside it, synced, renamed. From then on the layer is read from that
    /// file, and its blocks leave the cache. Blocks the caller; its requests never hold up readers.
    ///
    /// # Errors
    /// [`CompleteError`]. A wrong digest poisons the layer: every later read of it fails and says why.
    pub fn complete(&self) -> Result<Digest, CompleteError> {
        self.complete_while(|| true)
    }

    /// The same, given up between two blocks when it is no longer `wanted`.
    pub(super) fn complete_while(&self, wanted: impl Fn() -> bool) -> Result<Digest, CompleteError> {
        if let Some(local) = self.local.get() {
            return sha256(local).map_err(CompleteError::Read);
        }
        let Some(path) = self.path.as_deref() else {
            let (_, digest) = self.copy_into(io::sink(), Path::new("nowhere"), wanted)?;
            self.judge(digest)?;
            return Ok(digest);
        };
        let temporary = Temporary::create(path)?;
        let failed = |error| CompleteError::Write(path.to_owned(), error);
        let (_, digest) = self.copy_into(&temporary.file, path, wanted)?;
        self.judge(digest)?;
        let file = temporary.publish(path).map_err(failed)?;
        let local = FileSource::new(file).map_err(failed)?;
        let _ = self.local.set(local);
        self.fetcher.shared.erase_all(&self.fetcher.layer);
        Ok(digest)
    }

    fn judge(&self, found: Digest) -> Result<(), CompleteError> {
        match self.digest {
            Some(declared) if declared != found => {
                let error = CompleteError::Digest { declared, found };
                tracing::error!(url = %self.fetcher.origin.shown(), %error, "a layer must not be read any more");
                self.fetcher.shared.poison(&self.fetcher.layer, error.to_string());
                Err(error)
            }
            Some(_) => {
                self.fetcher.layer.set_verified();
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn copy_into<W: Write>(
        &self,
        output: W,
        path: &Path,
        wanted: impl Fn() -> bool,
    ) -> Result<(W, Digest), CompleteError> {
        let mut output = DigestWriter::new(output);
        let mut buf = vec![0; BLOCK as usize];
        let mut offset = 0;
        let size = self.fetcher.layer.size;
        while offset < size {
            if !wanted() {
                return Err(CompleteError::Unwanted);
            }
            let part = &mut buf[..(size - offset).min(BLOCK) as usize];
            self.read(part, offset, Lane::Background).map_err(CompleteError::Read)?;
            output.write_all(part).map_err(|error| CompleteError::Write(path.to_owned(), error))?;
            offset += part.len() as u64;
        }
        Ok(output.finish())
    }
}

/// The file a layer is assembled in. Locked while it is used, so that a second assembly does not write into it and one
/// left by a killed daemon can be told and used again.
struct Temporary {
    file: File,
    path: PathBuf,
    published: bool,
}

impl Temporary {
    fn create(target: &Path) -> Result<Self, CompleteError> {
        let mut name = OsString::from(".");
        name.push(target.file_name().unwrap_or_default());
        name.push(".partial");
        let path = target.with_file_name(name);
        let failed = |error| CompleteError::Write(path.clone(), error);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32).open(&path).map_err(failed)?;
        rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| CompleteError::Busy(target.to_owned()))?;
        // Another assembly may have published this very file between our opening and locking it.
        let locked = file.metadata().map_err(failed)?;
        let same = |here: std::fs::Metadata| (here.dev(), here.ino()) == (locked.dev(), locked.ino());
        if !std::fs::symlink_metadata(&path).is_ok_and(same) {
            return Err(CompleteError::Busy(target.to_owned()));
        }
        file.set_len(0).map_err(failed)?;
        Ok(Self { file, path, published: false })
    }

    fn publish(mut self, target: &Path) -> io::Result<File> {
        self.file.sync_all()?;
        std::fs::rename(&self.path, target)?;
        self.published = true;
        if let Some(parent) = target.parent() {
            File::open(parent)?.sync_all()?;
        }
        File::open(target)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.published {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
