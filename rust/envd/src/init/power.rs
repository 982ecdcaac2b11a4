//! The end of the machine.

use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::mount::{mount, MsFlags};
use nix::sys::reboot::{reboot, set_cad_enabled, RebootMode};
use nix::sys::signal::{kill, Signal};
use nix::sys::wait::{waitpid, WaitPidFlag};
use nix::unistd::{sync, Pid};

use crate::log;

/// How long processes may take to end after SIGTERM.
const GRACE: Duration = Duration::from_secs(2);
const INTERVAL: Duration = Duration::from_millis(10);

/// Makes ctrl-alt-del a SIGINT to us instead of an immediate reset.
pub fn handle_ctrl_alt_del() {
    let _ = set_cad_enabled(false);
}

/// Ends every process, leaves a clean file system and powers off.
pub fn off() -> ! {
    end_processes();
    sync();
    // Read-only marks the file system clean. Without processes nothing holds it open for writing but a deleted file.
    let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    if let Err(errno) = mount(None::<&str>, "/", None::<&str>, read_only, None::<&str>) {
        log!("root stays writable, synced only: {errno}");
    }
    sync();
    log!("power off");
    loop {
        // These return only where the platform has no way to do it.
        let _ = reboot(RebootMode::RB_POWER_OFF);
        let _ = reboot(RebootMode::RB_AUTOBOOT);
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// SIGTERM, a while to react, SIGKILL. The daemon's reaper has stopped by now, so children are collected here.
fn end_processes() {
    let everyone = Pid::from_raw(-1);
    if kill(everyone, Signal::SIGTERM) == Err(Errno::ESRCH) {
        return;
    }
    if !all_gone_by(Instant::now() + GRACE) {
        let _ = kill(everyone, Signal::SIGKILL);
        all_gone_by(Instant::now() + GRACE);
    }
}

fn all_gone_by(deadline: Instant) -> bool {
    while Instant::now() < deadline {
        match waitpid(Pid::from_raw(-1), Some(WaitPidFlag::WNOHANG)) {
            Err(Errno::ECHILD) => return true,
            Ok(nix::sys::wait::WaitStatus::StillAlive) => std::thread::sleep(INTERVAL),
            _ => {}
        }
    }
    false
}
