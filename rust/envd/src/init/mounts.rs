//! The file systems a Linux userland expects.

use std::fs;
use std::os::fd::IntoRawFd;
use std::os::unix::fs::{symlink, PermissionsExt};
use std::path::Path;

use nix::errno::Errno;
use nix::mount::{mount, MsFlags};

use super::{BootError, Context};
use crate::log;

/// The mounts that move along from the initramfs to the root disk.
pub const MOVED: [&str; 3] = ["dev", "proc", "sys"];

/// /dev, /proc and /sys of the initramfs, and descriptors 0, 1 and 2 if the kernel found no console to give us.
///
/// # Errors
/// When one cannot be mounted.
pub fn early() -> Result<(), BootError> {
    let quiet = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    mount_at("devtmpfs", "/dev", "devtmpfs", MsFlags::MS_NOSUID, "mode=0755")?;
    mount_at("proc", "/proc", "proc", quiet | MsFlags::MS_NODEV, "")?;
    mount_at("sysfs", "/sys", "sysfs", quiet | MsFlags::MS_NODEV, "")?;
    open_standard_streams();
    Ok(())
}

/// Descriptors 0..=2 must be taken, or a later pipe would become somebody's stdout.
pub fn open_standard_streams() {
    for path in ["/dev/console", "/dev/null"] {
        let Ok(file) = fs::File::options().read(true).write(true).open(path) else { continue };
        let mut fd = file.into_raw_fd();
        while (0..=2).contains(&fd) {
            // SAFETY: duplicates a descriptor we own, into the lowest free number.
            fd = unsafe { libc::dup(fd) };
        }
        if fd > 2 {
            // SAFETY: closes the one duplicate too many, which nothing else knows.
            unsafe { libc::close(fd) };
            return;
        }
    }
}

/// Everything else, on the root disk. What userland can live without is only logged when it fails.
///
/// # Errors
/// When /run, which envd itself needs, cannot be mounted.
pub fn userland() -> Result<(), BootError> {
    let nothing = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    let quiet = nothing | MsFlags::MS_NOEXEC;
    mount_at("tmpfs", "/run", "tmpfs", nothing | MsFlags::MS_NOATIME, "mode=0755,size=20%")?;
    for (source, target, kind, flags, data) in [
        // gid 5 is tty everywhere.
        ("devpts", "/dev/pts", "devpts", MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC, "gid=5,mode=0620,ptmxmode=0666"),
        ("tmpfs", "/dev/shm", "tmpfs", nothing, "mode=1777"),
        ("mqueue", "/dev/mqueue", "mqueue", quiet, ""),
        ("cgroup2", "/sys/fs/cgroup", "cgroup2", quiet, "nsdelegate"),
    ] {
        if let Err(error) = mount_at(source, target, kind, flags, data) {
            log!("{error}");
        }
    }
    for (target, link) in [
        ("/proc/self/fd", "/dev/fd"),
        ("/proc/self/fd/0", "/dev/stdin"),
        ("/proc/self/fd/1", "/dev/stdout"),
        ("/proc/self/fd/2", "/dev/stderr"),
    ] {
        // Present when devtmpfs made it.
        let _ = symlink(target, link);
    }
    directory("/run/lock", 0o1777);
    // Programs of every user can see here that they are a new copy.
    directory("/run/aenv", 0o755);
    directory("/tmp", 0o1777);
    Ok(())
}

fn directory(path: &str, mode: u32) {
    let made = fs::create_dir_all(path).and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(mode)));
    if let Err(error) = made {
        log!("{path}: {error}");
    }
}

fn mount_at(source: &str, target: &str, kind: &str, flags: MsFlags, data: &str) -> Result<(), BootError> {
    // The image may lack the directory; one that is there already is what we want.
    let _ = fs::create_dir_all(target);
    match mount(Some(source), Path::new(target), Some(kind), flags, Some(data)) {
        // EBUSY: the kernel mounted it already (CONFIG_DEVTMPFS_MOUNT).
        Ok(()) | Err(Errno::EBUSY) => Ok(()),
        Err(errno) => Err(errno).context(|| format!("mounting {kind} on {target}")),
    }
}
