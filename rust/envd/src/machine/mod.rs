//! Machine-wide things that change when a guest starts, resumes or is forked.
//!
//! What every launch changes is held open from boot on and written in place, on tmpfs: after a restore under emulation the
//! first use of each piece of kernel code costs, and opening, creating and renaming files use a lot of it.

pub mod certificates;
pub mod clock;
pub mod entropy;
pub mod names;
pub mod ports;

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// Where programs in the guest can see that they are a new copy.
pub const GENERATION: &str = "/run/aenv/generation";

/// The guest this process is the init of, ready to become another one.
#[derive(Debug)]
pub struct Machine {
    /// The kernel's random numbers.
    pub entropy: entropy::Pool,
    /// The local ports of connections.
    pub ports: ports::Range,
    /// Hostname, /etc/hostname and /etc/hosts.
    pub names: names::Names,
    generation: File,
}

impl Machine {
    /// Opens everything; /run, /proc and /dev must be mounted.
    ///
    /// # Errors
    /// Those of opening and creating the files.
    pub fn open() -> io::Result<Self> {
        Ok(Self {
            entropy: entropy::Pool::open()?,
            ports: ports::Range::open()?,
            names: names::Names::open()?,
            generation: in_place(Path::new(GENERATION), 0o644)?,
        })
    }

    /// Writes /run/aenv/generation.
    ///
    /// # Errors
    /// Those of writing.
    pub fn set_generation(&self, generation: &str) -> io::Result<()> {
        overwrite(&self.generation, generation.as_bytes())
    }
}

/// A file to be written in place, created when there is none.
fn in_place(path: &Path, mode: u32) -> io::Result<File> {
    File::options().read(true).write(true).create(true).truncate(false).mode(mode).open(path)
}

/// Makes `content` all a small file holds, with one write where the length stays: names and generations are all as long as
/// each other, so nobody sees an empty or a longer file.
fn overwrite(file: &File, content: &[u8]) -> io::Result<()> {
    file.write_all_at(content, 0)?;
    let length = content.len() as u64;
    if file.metadata()?.len() != length {
        file.set_len(length)?;
    }
    Ok(())
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
        let file = in_place(&path, 0o644).expect("created");
        for content in ["g-0001", "g-0002", "longer than that", "", "x"] {
            overwrite(&file, content.as_bytes()).expect("written");
            assert_eq!(std::fs::read_to_string(&path).expect("read"), content);
        }
        assert_eq!(std::fs::read_to_string(&path).expect("read"), "x");
        assert_eq!(in_place(&path, 0o644).expect("opened").metadata().expect("metadata").len(), 1);
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
