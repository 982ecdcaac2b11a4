//! From the initramfs to the root disk.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::mount::{mount, MsFlags};
use nix::unistd::{chdir, chroot};

use super::mounts::MOVED;
use super::{BootError, Context};
use crate::log;

/// Disks of a virtual machine are there at once or never; generous for emulated CPUs.
const DEADLINE: Duration = Duration::from_secs(20);
/// The kernel announces devices through uevents, but nothing of ours listens to them this early; this costs at most one interval.
const INTERVAL: Duration = Duration::from_millis(5);

const NEW_ROOT: &str = "/newroot";

/// Waits until the device exists.
///
/// # Errors
/// After 20 seconds, with the block devices that do exist.
pub fn wait_for(device: &str) -> Result<(), BootError> {
    let started = Instant::now();
    while !Path::new(device).exists() {
        if started.elapsed() > DEADLINE {
            let names = fs::read_dir("/sys/block")
                .map(|entries| entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect())
                .unwrap_or_else(|_| Vec::new());
            let found = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            return Err(io::Error::from(io::ErrorKind::TimedOut))
                .context(|| format!("root disk {device} did not appear within {DEADLINE:?}, block devices: {found}"));
        }
        std::thread::sleep(INTERVAL);
    }
    Ok(())
}

/// Mounts the device and makes it `/`; frees the memory of the initramfs.
///
/// # Errors
/// When the device holds no ext4 or a step is refused.
pub fn switch_to(device: &str) -> Result<(), BootError> {
    let initramfs = fs::metadata("/").context(|| "looking at the initramfs".into())?.dev();
    fs::create_dir_all(NEW_ROOT).context(|| format!("creating {NEW_ROOT}"))?;
    // Unused inode tables read as zeros from the sparse image, and block bitmaps are read when they are used: no thread has to
    // go through them all in every guest.
    let lazy = "noinit_itable,no_prefetch_block_bitmaps";
    mount(Some(device), NEW_ROOT, Some("ext4"), MsFlags::MS_NOATIME, Some(lazy))
        .context(|| format!("mounting {device} as ext4"))?;
    for name in MOVED {
        let target = Path::new(NEW_ROOT).join(name);
        fs::create_dir_all(&target).context(|| format!("creating {}", target.display()))?;
        mount(Some(&Path::new("/").join(name)), &target, None::<&str>, MsFlags::MS_MOVE, None::<&str>)
            .context(|| format!("moving /{name}"))?;
    }
    chdir(NEW_ROOT).context(|| format!("entering {NEW_ROOT}"))?;
    free(Path::new("/"), initramfs);
    mount(Some("."), "/", None::<&str>, MsFlags::MS_MOVE, None::<&str>).context(|| "moving the root".into())?;
    chroot(".").context(|| "changing the root".into())?;
    chdir("/").context(|| "entering the new root".into())
}

/// Deletes everything of the initramfs, and nothing of what is mounted on it. Our own program goes with it: its pages live as
/// long as we do.
fn free(dir: &Path, device: u64) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        let Ok(metadata) = path.symlink_metadata() else { continue };
        if metadata.dev() != device {
            continue;
        }
        let removed = if metadata.is_dir() {
            free(&path, device);
            fs::remove_dir(&path)
        } else {
            fs::remove_file(&path)
        };
        if let Err(error) = removed {
            log!("freeing the initramfs: {}: {error}", path.display());
        }
    }
}
