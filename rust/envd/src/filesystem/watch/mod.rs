//! `WatchDir`, and its form for clients that poll: `CreateWatcher`, `GetWatcherEvents`, `RemoveWatcher`.
//!
//! Every queue is bounded. A stream is read from the kernel only as fast as its client takes it; what the kernel cannot hold
//! (fs.inotify.max_queued_events) is lost, and the stream then ends with `resource_exhausted`. A poller's events wait in
//! [`registry`], which says what happens when they are too many.

pub mod registry;
mod tree;
pub mod wire;

use std::ffi::OsStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::inotify::{self, CreateFlags, Reader};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;
use tokio::io::Interest;

use self::tree::{Raw, Tree};
use self::wire::{FilesystemEvent, WatchRequest};
use super::blocking;
use super::error::{FsError, FsErrorKind};
use super::list::require_directory;

/// Most kernel events read at a time.
const MAX_BATCH: usize = 1024;

/// File systems whose changes may be made by other machines or processes, which inotify does not see (statfs(2)).
const NETWORK_FILESYSTEMS: [(u32, &str); 5] =
    [(0x6969, "NFS"), (0xff53_4d42, "CIFS"), (0xfe53_4d42, "SMB2"), (0x517b, "SMB"), (0x6573_5546, "FUSE")];

/// A running watch.
pub struct Watch {
    inotify: Arc<AsyncFd<OwnedFd>>,
    tree: Option<Tree>,
}

impl Watch {
    /// Watches the directory `path`. When this returns, nothing is missed any more.
    ///
    /// # Errors
    /// `not_found`; `invalid_argument` for what is no directory or is on a network mount; `resource_exhausted`.
    pub async fn start(path: PathBuf, request: &WatchRequest) -> Result<Self, FsError> {
        let failed = |error: io::Error| FsError::io("watch", &path, &error);
        let descriptor = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC);
        let descriptor = descriptor.map_err(|errno| failed(errno.into()))?;
        // SAFETY: `OwnedFd` always returns the same descriptor and keeps it open until it is dropped, which the
        // `AsyncFd` that owns it does only after deregistering it; nothing here takes it out or replaces it.
        let registered = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) };
        let inotify = Arc::new(registered.map_err(|error| failed(error.into()))?);
        let (recursive, include_entry) = (request.recursive, request.include_entry);
        let (shared, anywhere) = (inotify.clone(), request.allow_network_mounts);
        let tree = blocking(move || {
            require_directory(&path)?;
            if !anywhere {
                refuse_network_mount(&path)?;
            }
            Tree::new(shared, path, recursive, include_entry)
        });
        let tree = Some(tree.await?);
        Ok(Self { inotify, tree })
    }

    /// Waits for the next events; never empty.
    ///
    /// # Errors
    /// `resource_exhausted` when events were lost. The watch is over then.
    pub async fn next(&mut self) -> Result<Vec<FilesystemEvent>, FsError> {
        loop {
            let batch = self.batch().await.map_err(|error| FsError::io("watch", Path::new("inotify"), &error))?;
            let Some(mut tree) = self.tree.take() else {
                return Err(FsError::new(FsErrorKind::Internal, "the watch is over"));
            };
            let (tree, events) = blocking(move || {
                let events = tree.translate(batch)?;
                Ok((tree, events))
            })
            .await?;
            self.tree = Some(tree);
            if !events.is_empty() {
                return Ok(events);
            }
        }
    }

    async fn batch(&self) -> io::Result<Vec<Raw>> {
        loop {
            let mut ready = self.inotify.readable().await?;
            if let Ok(batch) = ready.try_io(|inotify| read(inotify.get_ref())) {
                return batch;
            }
        }
    }
}

/// Reads what there is, at most [`MAX_BATCH`] events and the rest of one read. `WouldBlock` when there is nothing.
fn read(inotify: &OwnedFd) -> io::Result<Vec<Raw>> {
    let mut buffer = [MaybeUninit::uninit(); 16 << 10];
    let mut reader = Reader::new(inotify, &mut buffer);
    let mut batch = Vec::new();
    loop {
        if batch.len() >= MAX_BATCH && reader.is_buffer_empty() {
            return Ok(batch);
        }
        match reader.next() {
            Ok(event) => batch.push(Raw {
                wd: event.wd(),
                flags: event.events(),
                cookie: event.cookie(),
                name: event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()).to_owned()),
            }),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if !batch.is_empty() => return Ok(batch),
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn refuse_network_mount(path: &Path) -> Result<(), FsError> {
    let found = rustix::fs::statfs(path).map_err(|errno| FsError::errno("watch", path, errno))?;
    // The magic numbers have 32 bits; the field's width and sign vary by architecture.
    match NETWORK_FILESYSTEMS.iter().find(|&&(magic, _)| magic == found.f_type as u32) {
        None => Ok(()),
        Some((_, name)) => Err(FsError::invalid(format!(
            "path '{}' is on a network mount ({name}), where changes may go unseen; set allowNetworkMounts to watch it anyway",
            path.display()
        ))),
    }
}

/// `relative` below `root`; the root itself for `.` and the empty path.
fn absolute(root: &Path, relative: &Path) -> PathBuf {
    if relative.as_os_str().is_empty() || relative == Path::new(".") {
        root.to_owned()
    } else {
        root.join(relative)
    }
}

#[cfg(test)]
mod tests {
    use super::wire::EventType::{self, Chmod, Create, Remove, Rename, Write};
    use super::*;
    use std::fs;

    async fn watch(path: &Path, recursive: bool) -> Result<Watch, FsError> {
        let request =
            WatchRequest { path: String::new(), recursive, include_entry: false, allow_network_mounts: false };
        Watch::start(path.to_owned(), &request).await
    }

    /// Events up to the first about `last`.
    async fn until(watch: &mut Watch, last: (&str, EventType)) -> Vec<(String, EventType)> {
        let mut all = Vec::new();
        loop {
            let next = tokio::time::timeout(std::time::Duration::from_secs(10), watch.next()).await;
            all.extend(next.expect("in time").unwrap().into_iter().map(|event| (event.name, event.r#type)));
            if all.iter().any(|(name, kind)| (name.as_str(), *kind) == last) {
                return all;
            }
        }
    }

    fn named(events: &[(&str, EventType)]) -> Vec<(String, EventType)> {
        events.iter().map(|&(name, kind)| (name.to_owned(), kind)).collect()
    }

    #[tokio::test]
    async fn changes_in_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("below")).unwrap();
        let mut watch = watch(dir.path(), false).await.unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("a"), "x").unwrap();
        fs::rename(at("a"), at("b")).unwrap();
        fs::set_permissions(at("b"), fs::metadata(at("b")).unwrap().permissions()).unwrap();
        fs::write(at("below/unseen"), "").unwrap();
        fs::remove_file(at("b")).unwrap();
        let expected = [("a", Create), ("a", Write), ("a", Rename), ("b", Create), ("b", Chmod), ("b", Remove)];
        assert_eq!(until(&mut watch, ("b", Remove)).await, named(&expected));
    }

    #[tokio::test]
    async fn recursion_follows_new_and_renamed_directories() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("old/deep")).unwrap();
        let mut watch = watch(dir.path(), true).await.unwrap();
        fs::write(at("old/deep/f"), "").unwrap();
        fs::rename(at("old"), at("new")).unwrap();
        fs::write(at("new/deep/g"), "").unwrap();
        // All before it is read: the directories below are not yet watched when they get their content.
        fs::create_dir_all(at("x/y")).unwrap();
        fs::write(at("x/y/z"), "").unwrap();
        fs::write(at("end"), "").unwrap();
        let events = until(&mut watch, ("end", Create)).await;
        let expected = [
            ("old/deep/f", Create),
            ("old", Rename),
            ("new", Create),
            ("new/deep/g", Create),
            ("x", Create),
            ("x/y", Create),
            ("x/y/z", Create),
            ("end", Create),
        ];
        assert_eq!(events, named(&expected));
        fs::remove_file(at("x/y/z")).unwrap();
        fs::write(at("x/y/z"), "").unwrap();
        assert_eq!(until(&mut watch, ("x/y/z", Create)).await, named(&[("x/y/z", Remove), ("x/y/z", Create)]));
    }

    #[tokio::test]
    async fn a_directory_that_leaves_is_no_longer_watched() {
        let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir(dir.path().join("d")).unwrap();
        let mut watch = watch(dir.path(), true).await.unwrap();
        fs::rename(dir.path().join("d"), outside.path().join("d")).unwrap();
        assert_eq!(until(&mut watch, ("d", Rename)).await, named(&[("d", Rename)]));
        fs::write(outside.path().join("d/unseen"), "").unwrap();
        fs::write(dir.path().join("end"), "").unwrap();
        assert_eq!(until(&mut watch, ("end", Create)).await, named(&[("end", Create)]));
    }

    #[tokio::test]
    async fn what_cannot_be_watched() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("f"), "").unwrap();
        let kind = |error: Option<FsError>| error.unwrap().kind;
        assert_eq!(kind(watch(&dir.path().join("gone"), false).await.err()), FsErrorKind::NotFound);
        let error = watch(&dir.path().join("f"), false).await.err().unwrap();
        assert_eq!(error.kind, FsErrorKind::InvalidArgument);
        assert!(error.message.ends_with("is not a directory"), "{}", error.message);
    }

    #[tokio::test]
    async fn lost_events_end_the_watch() {
        let dir = tempfile::tempdir().unwrap();
        let mut watch = watch(dir.path(), false).await.unwrap();
        let batch = vec![Raw { wd: -1, flags: inotify::ReadFlags::QUEUE_OVERFLOW, cookie: 0, name: None }];
        let error = watch.tree.as_mut().unwrap().translate(batch).unwrap_err();
        assert_eq!(error.kind, FsErrorKind::ResourceExhausted);
    }
}
