//! Machine-wide things that change when a guest starts, resumes or is forked.
//!
//! What every launch changes is held open from boot on and written in place, on tmpfs: after a restore under emulation the
//! first use of each piece of kernel code costs, and opening, creating and renaming files use a lot of it.

pub mod certificates;
pub mod clock;
pub mod entropy;
pub mod mailbox;
pub mod names;
pub mod ports;

use std::fs::File;
use std::io::{self, Write};
use std::net::Ipv4Addr;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Where programs in the guest can see that they are a new copy.
pub const GENERATION: &str = "/run/aenv/generation";

/// The guest this process is the init of, ready to become another one.
#[derive(Debug)]
pub struct Machine {
    /// What the host's requests come from: the gateway of our network.
    pub host: Ipv4Addr,
    /// The kernel's random numbers.
    pub entropy: entropy::Pool,
    /// The local ports of connections.
    pub ports: ports::Range,
    /// Hostname, /etc/hostname and /etc/hosts.
    pub names: names::Names,
    /// What the host may put a launch's words into, where it has given us such memory.
    pub mailbox: Option<mailbox::Mailbox>,
    generation: InPlace,
}

impl Machine {
    /// Opens everything; /run, /proc and /dev must be mounted.
    ///
    /// # Errors
    /// Those of opening and creating the files.
    pub fn open(host: Ipv4Addr, mailbox: Option<mailbox::Mailbox>) -> io::Result<Self> {
        Ok(Self {
            host,
            mailbox,
            entropy: entropy::Pool::open()?,
            ports: ports::Range::open()?,
            names: names::Names::open()?,
            generation: InPlace::open(Path::new(GENERATION))?,
        })
    }

    /// Writes /run/aenv/generation.
    ///
    /// # Errors
    /// Those of writing.
    pub fn set_generation(&self, generation: &str) -> io::Result<()> {
        self.generation.write(generation.as_bytes())
    }
}

/// A small file that is written in place, with one call where the length stays: names and generations are all as long as each
/// other, so nobody sees an empty or a longer file.
#[derive(Debug)]
struct InPlace {
    file: File,
    /// As we know it.
    length: Mutex<u64>,
}

impl InPlace {
    /// Opens the file, or creates it empty.
    fn open(path: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).create(true).truncate(false).mode(0o644).open(path)?;
        let length = Mutex::new(file.metadata()?.len());
        Ok(Self { file, length })
    }

    /// Makes `content` all the file holds.
    fn write(&self, content: &[u8]) -> io::Result<()> {
        let mut length = self.length.lock().unwrap_or_else(PoisonError::into_inner);
        self.file.write_all_at(content, 0)?;
        let wanted = content.len() as u64;
        if *length != wanted {
            self.file.set_len(wanted)?;
            *length = wanted;
        }
        Ok(())
    }

    /// All it holds, or `None` when that is more than `limit` bytes.
    fn read(&self, limit: usize) -> io::Result<Option<Vec<u8>>> {
        let mut bytes = vec![0; 4096];
        let mut filled = 0;
        loop {
            let read = self.file.read_at(&mut bytes[filled..], filled as u64)?;
            filled += read;
            if filled > limit {
                return Ok(None);
            }
            if read == 0 {
                bytes.truncate(filled);
                *self.length.lock().unwrap_or_else(PoisonError::into_inner) = filled as u64;
                return Ok(Some(bytes));
            }
            if filled == bytes.len() {
                bytes.resize(filled * 2, 0);
            }
        }
    }
}

/// Replaces a file so that readers see the old or the new content, never a part. A symlink at `path` is replaced, not followed.
///
/// # Errors
/// Those of creating, writing or renaming.
pub fn replace_file(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".aenv-new");
    let temporary = path.with_file_name(name);
    let result = File::create(&temporary)
        .and_then(|mut file| file.write_all(content))
        .and_then(|()| std::fs::rename(&temporary, path));
    if result.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overwriting_leaves_nothing_of_a_longer_content() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("file");
        let file = InPlace::open(&path).expect("created");
        for content in ["g-0001", "g-0002", "longer than that", "", "x"] {
            file.write(content.as_bytes()).expect("written");
            assert_eq!(std::fs::read_to_string(&path).expect("read"), content);
        }
        let again = InPlace::open(&path).expect("opened");
        assert_eq!(again.read(9).expect("read").as_deref(), Some(&b"x"[..]));
        // What others have made of it counts once it is read.
        std::fs::write(&path, "y".repeat(5000)).expect("write");
        assert_eq!(again.read(4096).expect("read"), None);
        assert_eq!(again.read(9000).expect("read").map(|bytes| bytes.len()), Some(5000));
        again.write(b"z").expect("written");
        assert_eq!(std::fs::read_to_string(&path).expect("read"), "z");
    }

    #[test]
    fn replaces_a_symlink_and_leaves_its_target() {
        let dir = tempfile::tempdir().expect("directory");
        let (target, link) = (dir.path().join("target"), dir.path().join("link"));
        std::fs::write(&target, "kept").expect("write");
        std::os::unix::fs::symlink(&target, &link).expect("symlink");
        replace_file(&link, b"new").expect("replace");
        assert_eq!(std::fs::read(&target).expect("read"), b"kept");
        assert_eq!(std::fs::read(&link).expect("read"), b"new");
        assert_eq!(std::fs::read_dir(dir.path()).expect("list").count(), 2);
    }
}
