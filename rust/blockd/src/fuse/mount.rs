//! The mount itself.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::privileges::{self, Capability};
use crate::Error;

/// How the mount shows in `/proc/self/mountinfo`.
const SOURCE: &str = "aenv-blockd";
/// Mounts that may be stacked on the directory, each left behind by a killed daemon.
const MAX_STALE: usize = 64;

/// A mounted FUSE file system. Unmounted when dropped.
pub struct Mount {
    dir: PathBuf,
    device: Arc<File>,
}

impl Mount {
    /// Mounts on `dir`, which must exist.
    ///
    /// # Errors
    /// `/dev/fuse` is missing, or the kernel refuses.
    pub fn new(dir: &Path) -> Result<Self, Error> {
        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/fuse")
            .map_err(|e| Error::io("opening /dev/fuse (is the kernel module fuse loaded?)", &e))?;
        // The directory can be passed through by everybody and listed by root; each file has its own owner and mode.
        let options =
            format!("fd={},rootmode=40711,user_id=0,group_id=0,allow_other,default_permissions", device.as_raw_fd());
        let options = CString::new(options).map_err(|_| Error::invalid("mount options hold a NUL"))?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOATIME;
        privileges::with(Capability::SysAdmin, || {
            rustix::mount::mount(SOURCE, dir, "fuse.aenv-blockd", flags, Some(options.as_c_str()))
        })
        .map_err(|e| Error::io(format_args!("mounting on {}", dir.display()), &e.into()))?;
        Ok(Self { dir: dir.to_owned(), device: Arc::new(device) })
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The connection to the kernel.
    pub fn device(&self) -> Arc<File> {
        self.device.clone()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Err(error) = detach(&self.dir) {
            tracing::warn!(dir = %self.dir.display(), %error, "the mount stays; the next start removes it");
        }
    }
}

/// Removes what killed daemons left mounted on `dir`. Only dead mounts and ones of ours are touched.
///
/// # Errors
/// Something else is mounted there, or the kernel refuses.
pub fn clean_stale(dir: &Path) -> Result<usize, Error> {
    for removed in 0..MAX_STALE {
        let ours = is_ours(dir)?;
        // A dead FUSE mount answers every call with ENOTCONN.
        let dead = matches!(rustix::fs::stat(dir), Err(Errno::NOTCONN | Errno::CONNABORTED));
        if !ours && !dead {
            return Ok(removed);
        }
        detach(dir).map_err(|e| Error::io(format_args!("removing the stale mount on {}", dir.display()), &e))?;
    }
    Err(Error::invalid(format!("more than {MAX_STALE} mounts are stacked on {}", dir.display())))
}

fn is_ours(dir: &Path) -> Result<bool, Error> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").map_err(|e| Error::io("reading mounts", &e))?;
    Ok(table.lines().any(|line| mount_point(line).is_some_and(|point| Path::new(&point) == dir)))
}

/// The mount point of a line of mountinfo, if the mount is one of this program's.
fn mount_point(line: &str) -> Option<String> {
    let (fields, after) = line.split_once(" - ")?;
    (after.split(' ').nth(1)? == SOURCE).then(|| unescape(fields.split(' ').nth(4)?))?
}

/// Blanks and backslashes are written as three octal digits.
fn unescape(field: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let (byte, tail) = match (first, tail) {
            (b'\\', [a, b, c, tail @ ..]) => {
                let digits = [*a, *b, *c];
                (u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 8).ok()?, tail)
            }
            _ => (*first, tail),
        };
        bytes.push(byte);
        rest = tail;
    }
    String::from_utf8(bytes).ok()
}

fn detach(dir: &Path) -> io::Result<()> {
    // Lazily: files that are still open keep working or failing as they do, and the directory is free at once.
    Ok(privileges::with(Capability::SysAdmin, || rustix::mount::unmount(dir, UnmountFlags::DETACH))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_its_own_mounts_only() {
        let line = |point: &str, source: &str| format!("36 35 0:98 / {point} rw,nosuid shared:1 - fuse.x {source} rw");
        assert_eq!(mount_point(&line("/run/a\\040b\\134c", SOURCE)).as_deref(), Some("/run/a b\\c"));
        assert_eq!(mount_point(&line("/run/a", "sshfs")), None);
        assert_eq!(mount_point(""), None);
        assert_eq!(mount_point(&line("/run/\\9zz", SOURCE)), None);
    }
}
