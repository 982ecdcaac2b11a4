//! The driver, and the life of a device.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{mpsc, Arc};
use std::thread::JoinHandle;
use std::time::Duration;

use libublk::ctrl::{UblkCtrl, UblkCtrlBuilder};
use libublk::io::UblkDev;
use libublk::sys::{
    ublk_param_basic, ublk_param_discard, ublk_params, UBLK_ATTR_READ_ONLY, UBLK_ATTR_VOLATILE_CACHE,
    UBLK_PARAM_TYPE_BASIC, UBLK_PARAM_TYPE_DISCARD,
};
use libublk::{UblkError, UblkFlags};
use rustix::io::Errno;

use super::pool::Pool;
use super::queue;
use crate::image::Attached;
use crate::privileges::{self, Capability};
use crate::{Code, Error};

/// Where the kernel's driver is controlled.
const CONTROL: &str = "/dev/ublk-control";
/// Marks devices as made by this program ("aenv"), in a field the driver keeps for its servers.
const MARK: u64 = 0x6165_6e76;
/// Requests of a device in flight.
const DEPTH: u16 = 64;
/// Bytes of the largest request.
const MAX_IO: u32 = 128 << 10;
/// Largest discard or zeroing, in sectors: 1 GiB, so that one request takes bounded time.
const MAX_ZERO: u32 = 1 << 21;
/// How long a device may take to appear.
const START: Duration = Duration::from_secs(10);

/// The kernel's ublk driver.
pub struct Driver {
    pool: Arc<Pool>,
}

/// One block device. Ended when dropped.
pub struct Device {
    id: u32,
    path: PathBuf,
    server: Option<JoinHandle<Result<(), String>>>,
}

impl Driver {
    /// Finds the driver, or says why it cannot be used. Devices that a killed predecessor left are removed.
    ///
    /// # Errors
    /// The reason, for people.
    pub fn probe() -> Result<Self, String> {
        if !Path::new(CONTROL).exists() {
            return Err(format!("the kernel has no ublk ({CONTROL} is missing; is the module ublk_drv loaded?)"));
        }
        privileges::with(Capability::SysAdmin, || match UblkCtrl::get_features() {
            Some(features) => {
                tracing::info!(features = format_args!("{features:#x}"), "ublk is there");
                UblkCtrl::for_each_dev_id(remove_stale);
                Ok(Self { pool: Arc::new(Pool::default()) })
            }
            None => Err("the ublk driver does not tell its features (Linux 6.5 or later is needed)".into()),
        })
    }

    /// Makes a block device of an image.
    ///
    /// # Errors
    /// The kernel refuses, or takes too long.
    pub fn start(&self, image: Arc<Attached>) -> Result<Device, Error> {
        let what = format!("making a block device of image {}", image.name());
        let failed = |reason: String| Error::new(Code::Unsupported, format!("{what}: {reason}"));
        if image.size() % 512 != 0 {
            return Err(failed(format!("its {} bytes are not whole sectors", image.size())));
        }
        let owner = image.owner();
        let (ready, started) = mpsc::channel();
        let pool = self.pool.clone();
        let server = std::thread::Builder::new()
            .name("ublk".into())
            .spawn(move || privileges::with(Capability::SysAdmin, || serve(&image, &pool, ready)))
            .map_err(|e| Error::io(&what, &e))?;
        let Ok((id, path)) = started.recv_timeout(START) else {
            let reason = match server.is_finished() {
                true => server.join().unwrap_or_else(|_| Err("its thread panicked".to_owned())),
                false => Err(format!("it did not appear within {START:?}")),
            };
            return Err(failed(reason.err().unwrap_or_else(|| "it ended at once".to_owned())));
        };
        let device = Device { id, path, server: Some(server) };
        let (uid, gid) = (rustix::fs::Uid::from_raw(owner.uid), rustix::fs::Gid::from_raw(owner.gid));
        privileges::with(Capability::Chown, || rustix::fs::chown(device.path(), Some(uid), Some(gid)))
            .map_err(|e| Error::io(format_args!("giving {} to its owner", device.path().display()), &e.into()))?;
        Ok(device)
    }
}

/// Makes the device, tells of it, and serves it until it is stopped.
fn serve(image: &Arc<Attached>, pool: &Arc<Pool>, ready: mpsc::Sender<(u32, PathBuf)>) -> Result<(), String> {
    let failed = |e: UblkError| e.to_string();
    let control = UblkCtrlBuilder::default()
        .name("aenv-blockd")
        .nr_queues(1)
        .depth(DEPTH)
        .io_buf_bytes(MAX_IO)
        .ctrl_target_flags(MARK)
        .dev_flags(UblkFlags::UBLK_DEV_F_ADD_DEV)
        .build()
        .map_err(failed)?;
    let describe = |device: &mut UblkDev| {
        device.tgt.dev_size = image.size();
        device.tgt.params = parameters(image);
        Ok(())
    };
    let (served, shared) = (image.clone(), pool.clone());
    let serve_queue = move |id: u16, device: &UblkDev| {
        privileges::lower();
        if let Err(error) = queue::serve(id, device, &served, &shared) {
            tracing::error!(image = served.name(), %error, "a ublk queue ended");
        }
    };
    let tell = move |control: &UblkCtrl| {
        // Nobody listens any more if this took too long; the device is then stopped below.
        if ready.send((control.dev_info().dev_id, control.get_bdev_path().into())).is_err() {
            let _ = control.kill_dev();
        }
    };
    control.run_target(describe, serve_queue, tell).map(drop).map_err(failed)
}

fn parameters(image: &Attached) -> ublk_params {
    let read_only = if image.is_writable() { 0 } else { UBLK_ATTR_READ_ONLY };
    ublk_params {
        types: UBLK_PARAM_TYPE_BASIC | UBLK_PARAM_TYPE_DISCARD,
        basic: ublk_param_basic {
            // Flushes are honoured, so the kernel must send them.
            attrs: UBLK_ATTR_VOLATILE_CACHE | read_only,
            logical_bs_shift: 9,
            physical_bs_shift: 12,
            io_opt_shift: 12,
            io_min_shift: 12,
            max_sectors: MAX_IO >> 9,
            dev_sectors: image.size() >> 9,
            ..Default::default()
        },
        discard: ublk_param_discard {
            discard_granularity: 4096,
            max_discard_sectors: MAX_ZERO,
            max_write_zeroes_sectors: MAX_ZERO,
            max_discard_segments: 1,
            ..Default::default()
        },
        ..Default::default()
    }
}

/// Removes a device that this program made and whose process is gone.
fn remove_stale(id: u32) {
    let Ok(control) = UblkCtrl::new_simple(id as i32) else { return };
    if control.read_dev_info().is_err() {
        return;
    }
    let info = control.dev_info();
    if info.ublksrv_flags != MARK || has_open(info.ublksrv_pid, Path::new(&format!("/dev/ublkc{id}"))) {
        return;
    }
    match control.kill_dev().and_then(|_| control.del_dev()) {
        Ok(_) => tracing::info!(id, "removed a ublk device that a killed daemon left"),
        Err(error) => tracing::warn!(id, %error, "a ublk device that a killed daemon left stays"),
    }
}

/// Whether a process has this file open, or will not say. Its number alone tells nothing: another may have it by now.
fn has_open(pid: i32, path: &Path) -> bool {
    match std::fs::read_dir(format!("/proc/{pid}/fd")) {
        Ok(open) => open.flatten().any(|file| std::fs::read_link(file.path()).is_ok_and(|target| target == path)),
        Err(error) => error.kind() == std::io::ErrorKind::PermissionDenied,
    }
}

impl Device {
    /// The device node.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether somebody has the device for himself, as one who mounted it does.
    pub fn is_claimed(&self) -> bool {
        let opened =
            OpenOptions::new().read(true).custom_flags(rustix::fs::OFlags::EXCL.bits() as i32).open(&self.path);
        opened.is_err_and(|error| Errno::from_io_error(&error) == Some(Errno::BUSY))
    }

    /// Ends the device. Requests under way are answered first; later ones fail.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn stop(mut self) -> Result<(), Error> {
        self.end()
    }

    fn end(&mut self) -> Result<(), Error> {
        let Some(server) = self.server.take() else { return Ok(()) };
        let what = || format!("ending block device {}", self.path.display());
        let stop = || UblkCtrl::new_simple(self.id as i32).and_then(|control| control.kill_dev());
        let stopped = privileges::with(Capability::SysAdmin, stop);
        if let Err(error) = stopped {
            if !server.is_finished() {
                self.server = Some(server);
                return Err(Error::caused(Code::Io, what(), &error));
            }
        }
        match server.join() {
            Ok(Ok(())) => Ok(()),
            Ok(Err(reason)) => Err(Error::new(Code::Io, format!("{}: {reason}", what()))),
            Err(_) => Err(Error::new(Code::Io, format!("{}: its thread panicked", what()))),
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::warn!("{error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_what_it_has_open() {
        let own = std::process::id() as i32;
        let file = tempfile::NamedTempFile::new().expect("file");
        assert!(has_open(own, file.path()));
        let path = file.into_temp_path();
        assert!(!has_open(own, &path), "closed");
        assert!(!has_open(-1, &path) && !has_open(i32::MAX, &path), "nobody");
    }
}
