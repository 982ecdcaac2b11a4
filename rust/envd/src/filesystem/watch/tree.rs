//! Which directories a watch covers, and what the kernel's events mean to a client.
//!
//! The kinds of event and their order are those of Go's fsnotify, which the protocol was made with (§3.4): a rename is RENAME of
//! the old name and CREATE of the new one.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::inotify::{add_watch, remove_watch, ReadFlags, WatchFlags};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;

use super::super::entry;
use super::super::error::{FsError, FsErrorKind};
use super::wire::{EventType, FilesystemEvent};
use crate::users::UserDb;

/// What is asked of the kernel for each directory.
const INTEREST: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::EXCL_UNLINK)
    .union(WatchFlags::ONLYDIR);

/// One event as the kernel reports it.
#[derive(Debug)]
pub struct Raw {
    /// Watch descriptor.
    pub wd: i32,
    /// What happened.
    pub flags: ReadFlags,
    /// Joins the two halves of a rename.
    pub cookie: u32,
    /// Name in the directory; `None` for the directory itself.
    pub name: Option<OsString>,
}

/// A watched directory.
struct Directory {
    /// Below the root; empty for the root itself.
    relative: PathBuf,
    /// Entries that were found when the directory was new and reported then: the kernel's own event for them, if there is one,
    /// would be the second.
    announced: HashSet<OsString>,
}

/// The watched directories of one client.
pub struct Tree {
    inotify: Arc<AsyncFd<OwnedFd>>,
    root: PathBuf,
    recursive: bool,
    include_entry: bool,
    /// While a batch is translated, if events carry entries: read once for all of them.
    users: Option<UserDb>,
    directories: HashMap<i32, Directory>,
}

impl Tree {
    /// Starts watching `root`, and with `recursive` every directory below. Blocks.
    ///
    /// # Errors
    /// `resource_exhausted` when the kernel's limit of watches is reached; else as for a listing.
    pub fn new(
        inotify: Arc<AsyncFd<OwnedFd>>,
        root: PathBuf,
        recursive: bool,
        include_entry: bool,
    ) -> Result<Self, FsError> {
        let mut tree = Self { inotify, root, recursive, include_entry, users: None, directories: HashMap::new() };
        let wd = add_watch(tree.inotify.get_ref(), &tree.root, INTEREST).map_err(|errno| failed(&tree.root, errno))?;
        tree.directories.insert(wd, Directory { relative: PathBuf::new(), announced: HashSet::new() });
        if recursive {
            tree.cover_below(wd, PathBuf::new(), None)?;
        }
        Ok(tree)
    }

    /// Turns a batch of the kernel's events into those of the client, and follows changes of the tree. Blocks.
    ///
    /// # Errors
    /// `resource_exhausted` when events were lost or a new directory cannot be watched.
    pub fn translate(&mut self, batch: Vec<Raw>) -> Result<Vec<FilesystemEvent>, FsError> {
        let mut events = Vec::new();
        self.users = self.include_entry.then(UserDb::load);
        // Directories that left their place, by cookie; those that came to no other place in the tree have left it.
        let mut leaving: HashMap<u32, PathBuf> = HashMap::new();
        for raw in batch {
            if raw.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                let message =
                    "more happened than could be delivered and events were lost; list the directory and watch again";
                return Err(FsError::new(FsErrorKind::ResourceExhausted, message));
            }
            if raw.flags.contains(ReadFlags::IGNORED) {
                self.directories.remove(&raw.wd);
                continue;
            }
            let Some(directory) = self.directories.get_mut(&raw.wd) else { continue };
            let Some(kind) = kind(raw.flags) else { continue };
            let Some(name) = &raw.name else {
                // Of a directory below, the one above tells.
                if directory.relative.as_os_str().is_empty() {
                    events.push(self.event(PathBuf::from("."), kind));
                }
                continue;
            };
            let relative = directory.relative.join(name);
            let announced = match kind {
                EventType::Create => directory.announced.remove(name),
                EventType::Remove | EventType::Rename => {
                    directory.announced.remove(name);
                    false
                }
                EventType::Write | EventType::Chmod => false,
            };
            if !announced {
                events.push(self.event(relative.clone(), kind));
            }
            if self.recursive && raw.flags.contains(ReadFlags::ISDIR) {
                match kind {
                    EventType::Rename => {
                        leaving.insert(raw.cookie, relative);
                    }
                    EventType::Create if raw.flags.contains(ReadFlags::MOVED_TO) => match leaving.remove(&raw.cookie) {
                        Some(from) => self.relocate(&from, &relative),
                        None => self.cover(relative, None)?,
                    },
                    // Something may have been made in it before it was watched.
                    EventType::Create if !announced => self.cover(relative, Some(&mut events))?,
                    _ => {}
                }
            }
        }
        for relative in leaving.into_values() {
            self.forget(&relative);
        }
        Ok(events)
    }

    fn event(&self, relative: PathBuf, kind: EventType) -> FilesystemEvent {
        // What is gone by now has no entry.
        let describe = |users| entry::stat(&super::absolute(&self.root, &relative), users).ok();
        let entry = self.users.as_ref().and_then(describe);
        FilesystemEvent { name: relative.to_string_lossy().into_owned(), r#type: kind, entry }
    }

    /// Watches a directory below the root and all below it. With `found`, reports what is already in there.
    fn cover(&mut self, relative: PathBuf, found: Option<&mut Vec<FilesystemEvent>>) -> Result<(), FsError> {
        match self.add(&relative)? {
            Some(wd) => self.cover_below(wd, relative, found),
            None => Ok(()),
        }
    }

    fn cover_below(
        &mut self,
        wd: i32,
        top: PathBuf,
        mut found: Option<&mut Vec<FilesystemEvent>>,
    ) -> Result<(), FsError> {
        let mut pending = vec![(wd, top)];
        while let Some((wd, parent)) = pending.pop() {
            // Vanished, or closed even to root.
            let Ok(entries) = fs::read_dir(super::absolute(&self.root, &parent)) else { continue };
            for entry in entries.flatten() {
                let relative = parent.join(entry.file_name());
                if let Some(events) = found.as_deref_mut() {
                    if let Some(directory) = self.directories.get_mut(&wd) {
                        directory.announced.insert(entry.file_name());
                    }
                    events.push(self.event(relative.clone(), EventType::Create));
                }
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    if let Some(wd) = self.add(&relative)? {
                        pending.push((wd, relative));
                    }
                }
            }
        }
        Ok(())
    }

    /// Watches one directory below the root; `None` when it is gone or closed even to root.
    fn add(&mut self, relative: &Path) -> Result<Option<i32>, FsError> {
        let path = self.root.join(relative);
        match add_watch(self.inotify.get_ref(), &path, INTEREST | WatchFlags::DONT_FOLLOW) {
            Ok(wd) => {
                self.directories.insert(wd, Directory { relative: relative.to_owned(), announced: HashSet::new() });
                Ok(Some(wd))
            }
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ACCESS | Errno::NAMETOOLONG) => Ok(None),
            Err(errno) => Err(failed(&path, errno)),
        }
    }

    /// A directory was renamed inside the tree. The kernel's watches moved with it.
    fn relocate(&mut self, from: &Path, to: &Path) {
        for directory in self.directories.values_mut() {
            if let Ok(below) = directory.relative.strip_prefix(from) {
                directory.relative = if below.as_os_str().is_empty() { to.to_owned() } else { to.join(below) };
            }
        }
    }

    /// A directory has left the tree.
    fn forget(&mut self, top: &Path) {
        let inotify = &self.inotify;
        self.directories.retain(|&wd, directory| {
            let stays = !directory.relative.starts_with(top);
            if !stays {
                // It may be gone already.
                let _ = remove_watch(inotify.get_ref(), wd);
            }
            stays
        });
    }
}

/// The client's kind of event; `None` for what it is not told.
fn kind(flags: ReadFlags) -> Option<EventType> {
    const TABLE: [(ReadFlags, EventType); 5] = [
        (ReadFlags::CREATE.union(ReadFlags::MOVED_TO), EventType::Create),
        (ReadFlags::MODIFY, EventType::Write),
        (ReadFlags::DELETE.union(ReadFlags::DELETE_SELF), EventType::Remove),
        (ReadFlags::MOVED_FROM.union(ReadFlags::MOVE_SELF), EventType::Rename),
        (ReadFlags::ATTRIB, EventType::Chmod),
    ];
    TABLE.iter().find(|(mask, _)| flags.intersects(*mask)).map(|&(_, kind)| kind)
}

fn failed(path: &Path, errno: Errno) -> FsError {
    match errno {
        // What inotify_add_watch(2) means by it; not a full disk.
        Errno::NOSPC => FsError::new(
            FsErrorKind::ResourceExhausted,
            format!("cannot watch '{}': no watches left; raise fs.inotify.max_user_watches", path.display()),
        ),
        _ => FsError::errno("watch", path, errno),
    }
}
