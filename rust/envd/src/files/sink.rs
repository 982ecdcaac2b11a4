//! The file that an upload writes.
//!
//! Uploads write into the destination itself: its inode, mode and watchers stay, as clients expect. The price is that an upload
//! that fails on its way cannot leave the old content. It never leaves half of the new one either: a file that it created is
//! removed (parents that it made stay), a file that existed is left empty, and the space is free again.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use rustix::fs::{fstatvfs, ftruncate};

use super::open;
use crate::filesystem::blocking;
use crate::filesystem::error::{FsError, FsErrorKind};
use crate::filesystem::metadata::{self, UserMetadata};
use crate::filesystem::place::give;
use crate::log;
use crate::users::User;

/// Bytes of one write: a small file is written in one go, which watchers see as one event.
pub const BATCH: usize = 256 << 10;

/// Where an upload goes and how it comes.
pub struct Destination {
    /// Who will own the file and its new parents.
    pub owner: User,
    /// Absolute.
    pub path: PathBuf,
    /// Replaces what the file has.
    pub metadata: UserMetadata,
    /// The data are gzip and are to be stored decompressed.
    pub gzip: bool,
    /// Exact number of bytes to come, where it is known.
    pub length: Option<u64>,
}

/// An open upload. Dropped before [`Sink::finish`] it undoes what can be undone.
pub struct Sink {
    path: PathBuf,
    /// `None` once finished or discarded.
    open: Option<Open>,
}

struct Open {
    writer: Writer,
    /// Device and inode of the file, if this upload brought it into being.
    created: Option<(u64, u64)>,
}

enum Writer {
    Plain(File),
    Gzip(Box<MultiGzDecoder<BufWriter<File>>>),
}

impl Sink {
    /// Opens the destination: created with its parents or emptied, owned by the user, metadata replaced. In this order a watcher
    /// sees CREATE, CHMOD and, from the data, WRITE.
    ///
    /// # Errors
    /// See [`open::write`] and [`metadata::replace`]; `no space` when the known length does not fit, before anything is changed.
    pub async fn open(destination: Destination) -> Result<Self, FsError> {
        let Destination { owner, path, metadata, gzip, length } = destination;
        // The whole sink is made over there, so that it also undoes itself for a client that goes away in this moment.
        blocking(move || {
            require_space(&path, length)?;
            let target = open::write(&path, &owner)?;
            let found = target.file.metadata().map_err(|error| FsError::io("stat", &path, &error))?;
            let created = target.created.then_some((found.dev(), found.ino()));
            let mut sink = Self { path, open: Some(Open { writer: Writer::new(target.file, gzip), created }) };
            match sink.prepare(&owner, &metadata) {
                Ok(()) => Ok(sink),
                Err(error) => {
                    sink.undo().into_iter().for_each(|undo| undo());
                    Err(error)
                }
            }
        })
        .await
    }

    /// Writes more data.
    ///
    /// # Errors
    /// `no space`; `invalid_argument` when it is not gzip and should be. The upload has been discarded then.
    pub async fn write(self, batch: Bytes) -> Result<Self, FsError> {
        self.step(move |writer, path| writer.write(&batch, path)).await
    }

    /// Completes the file.
    ///
    /// # Errors
    /// As [`Sink::write`].
    pub async fn finish(self) -> Result<(), FsError> {
        let mut sink = self.step(Writer::finish).await?;
        sink.open = None;
        Ok(())
    }

    /// Undoes the upload and waits until that is done.
    pub async fn discard(mut self) {
        if let Some(undo) = self.undo() {
            // It does not panic, and a runtime that is shutting down has no one to tell.
            let _ = tokio::task::spawn_blocking(undo).await;
        }
    }

    fn prepare(&self, owner: &User, metadata: &UserMetadata) -> Result<(), FsError> {
        let Some(open) = &self.open else { return Ok(()) };
        give(open.writer.file(), &self.path, owner)?;
        metadata::replace(open.writer.file(), &self.path, metadata)
    }

    /// One piece of work on a blocking thread.
    async fn step<F>(mut self, work: F) -> Result<Self, FsError>
    where
        F: FnOnce(&mut Writer, &Path) -> Result<(), FsError> + Send + 'static,
    {
        let stepped = tokio::task::spawn_blocking(move || {
            let result = match &mut self.open {
                Some(open) => work(&mut open.writer, &self.path),
                None => Ok(()),
            };
            (self, result)
        });
        match stepped.await {
            Ok((sink, Ok(()))) => Ok(sink),
            Ok((sink, Err(error))) => {
                sink.discard().await;
                Err(error)
            }
            Err(error) => Err(FsError::new(FsErrorKind::Internal, format!("upload worker failed: {error}"))),
        }
    }

    /// The work that undoes the upload, for a blocking thread.
    fn undo(&mut self) -> Option<impl FnOnce() + Send + 'static> {
        let open = self.open.take()?;
        let path = self.path.clone();
        Some(move || {
            if let Err(error) = open.undo(&path) {
                log!("abandoned upload: {error}");
            }
        })
    }
}

impl Open {
    fn undo(self, path: &Path) -> Result<(), FsError> {
        let file = self.writer.file().try_clone().map_err(|error| FsError::io("duplicate", path, &error))?;
        // Writes what it still holds.
        drop(self.writer);
        ftruncate(&file, 0).map_err(|errno| FsError::errno("empty", path, errno))?;
        let ours = |found: fs::Metadata| Some((found.dev(), found.ino())) == self.created;
        if fs::symlink_metadata(path).is_ok_and(ours) {
            fs::remove_file(path).map_err(|error| FsError::io("remove", path, &error))?;
        }
        Ok(())
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        let Some(undo) = self.undo() else { return };
        // A client that goes away drops its request on the event loop, where freeing gigabytes must not happen.
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(undo)),
            Err(_) => undo(),
        }
    }
}

impl Writer {
    fn new(file: File, gzip: bool) -> Self {
        match gzip {
            false => Self::Plain(file),
            true => Self::Gzip(Box::new(MultiGzDecoder::new(BufWriter::with_capacity(BATCH, file)))),
        }
    }

    fn file(&self) -> &File {
        match self {
            Self::Plain(file) => file,
            Self::Gzip(decoder) => decoder.get_ref().get_ref(),
        }
    }

    fn write(&mut self, data: &[u8], path: &Path) -> Result<(), FsError> {
        match self {
            Self::Plain(file) => file.write_all(data).map_err(|error| FsError::io("write", path, &error)),
            Self::Gzip(decoder) => decoder.write_all(data).map_err(|error| gzip_error(path, &error)),
        }
    }

    fn finish(&mut self, path: &Path) -> Result<(), FsError> {
        match self {
            Self::Plain(_) => Ok(()),
            Self::Gzip(decoder) => {
                decoder.try_finish().and_then(|()| decoder.get_mut().flush()).map_err(|error| gzip_error(path, &error))
            }
        }
    }
}

/// What the kernel says has an error number, what the decoder says has none.
fn gzip_error(path: &Path, error: &io::Error) -> FsError {
    match error.raw_os_error() {
        Some(_) => FsError::io("write", path, error),
        None => FsError::invalid(format!("the upload to '{}' is not valid gzip: {error}", path.display())),
    }
}

/// Refuses an upload that cannot fit while the old file is still whole. What it would free counts as free, and so does what is
/// reserved for root, who writes it. An estimate: the file system may still refuse later.
fn require_space(path: &Path, length: Option<u64>) -> Result<(), FsError> {
    let Some(length) = length else { return Ok(()) };
    let existing = fs::metadata(path).map_or(0, |metadata| metadata.blocks() * 512);
    let nearest = path.ancestors().find_map(|ancestor| File::open(ancestor).ok());
    let Some(Ok(volume)) = nearest.map(|directory| fstatvfs(&directory)) else { return Ok(()) };
    let available = volume.f_bfree.saturating_mul(volume.f_frsize).saturating_add(existing);
    // Some file systems (FUSE, overlays) report no sizes.
    if volume.f_blocks > 0 && length > available {
        let message =
            format!("not enough space for '{}': {length} bytes to write, {available} available", path.display());
        return Err(FsError::new(FsErrorKind::NoSpace, message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::write::GzEncoder;
    use flate2::Compression;

    fn me() -> User {
        let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
        User { name: "me".into(), uid, gid, groups: vec![gid], home: "/".into(), shell: "/bin/sh".into() }
    }

    fn destination(path: &Path, gzip: bool) -> Destination {
        Destination { owner: me(), path: path.into(), metadata: UserMetadata::new(), gzip, length: None }
    }

    /// Runs `work`, then waits for the undoing of dropped sinks: with one blocking thread, work is done in its order.
    fn run(work: impl std::future::Future<Output = ()>) {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build().unwrap();
        runtime.block_on(async {
            work.await;
            tokio::task::spawn_blocking(|| ()).await.unwrap();
        });
    }

    #[test]
    fn a_finished_upload_stays_and_an_abandoned_one_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let (done, abandoned, existing) = (dir.path().join("done"), dir.path().join("gone"), dir.path().join("old"));
        fs::write(&existing, "old content").unwrap();
        run(async {
            let sink = Sink::open(destination(&done, false)).await.unwrap();
            sink.write(Bytes::from_static(b"data")).await.unwrap().finish().await.unwrap();
            for path in [&abandoned, &existing] {
                let sink = Sink::open(destination(path, false)).await.unwrap();
                drop(sink.write(Bytes::from_static(b"half")).await.unwrap());
            }
        });
        assert_eq!(fs::read(&done).unwrap(), b"data");
        assert!(!abandoned.exists());
        assert_eq!(fs::read(&existing).unwrap(), b"");
    }

    #[test]
    fn gzip_is_stored_decompressed_and_must_be_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(&vec![7; 3 * BATCH]).unwrap();
        let packed = encoder.finish().unwrap();
        run(async {
            let sink = Sink::open(destination(&path, true)).await.unwrap();
            sink.write(Bytes::from([packed.as_slice(), &packed].concat())).await.unwrap().finish().await.unwrap();
        });
        assert_eq!(fs::read(&path).unwrap(), vec![7; 6 * BATCH]);
        for broken in [&packed[..packed.len() - 3], b"plain text", b""] {
            let path = dir.path().join("broken");
            let broken = Bytes::copy_from_slice(broken);
            run(async {
                let sink = Sink::open(destination(&path, true)).await.unwrap();
                let result = match sink.write(broken).await {
                    Ok(sink) => sink.finish().await,
                    Err(error) => Err(error),
                };
                assert_eq!(result.unwrap_err().kind, FsErrorKind::InvalidArgument);
            });
            assert!(!path.exists());
        }
    }

    #[test]
    fn what_cannot_fit_is_refused_before_the_old_file_is_touched() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, "old").unwrap();
        run(async {
            let error = Sink::open(Destination { length: Some(u64::MAX), ..destination(&path, false) }).await.err();
            assert_eq!(error.unwrap().kind, FsErrorKind::NoSpace);
        });
        assert_eq!(fs::read(&path).unwrap(), b"old");
    }
}
