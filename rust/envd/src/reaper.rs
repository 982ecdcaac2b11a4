//! The one place that waits for children.
//!
//! As PID 1 envd inherits every orphan of the guest, so there is exactly one `waitpid(-1)` loop: whoever started a process
//! is told its status, everything else is just reaped. Forking and collecting hold the same lock, so a child that exits at once
//! is registered before it can be collected.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use nix::errno::Errno;
use nix::sys::wait::{waitpid, WaitPidFlag, WaitStatus};
use nix::unistd::Pid;
use tokio::signal::unix::{signal, SignalKind};
use tokio::sync::oneshot;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitStatus {
    /// It returned this code, 0..=255.
    Exited(i32),
    /// This signal killed it.
    Signaled {
        /// Signal number.
        signal: i32,
        /// Whether it left a core file.
        core_dumped: bool,
    },
}

/// Delivers exit statuses to those who started the processes.
#[derive(Debug, Default)]
pub struct Reaper {
    waiting: Mutex<HashMap<i32, oneshot::Sender<ExitStatus>>>,
}

impl Reaper {
    /// Forks with `fork`, which returns the child's pid, and registers the child. The receiver gets its status.
    ///
    /// # Errors
    /// Those of `fork`.
    pub fn spawn<E>(&self, fork: impl FnOnce() -> Result<Pid, E>) -> Result<(Pid, oneshot::Receiver<ExitStatus>), E> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let pid = fork()?;
        let (sender, receiver) = oneshot::channel();
        waiting.insert(pid.as_raw(), sender);
        Ok((pid, receiver))
    }

    /// Reaps for ever, woken by SIGCHLD.
    ///
    /// # Errors
    /// When the signal handler cannot be installed.
    pub async fn run(self: Arc<Self>) -> std::io::Result<std::convert::Infallible> {
        let mut child_exited = signal(SignalKind::child())?;
        loop {
            self.collect();
            child_exited.recv().await;
        }
    }

    /// Takes every status there is; SIGCHLD is not queued, one may stand for many.
    fn collect(&self) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let (pid, status) = match waitpid(Pid::from_raw(-1), Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, code)) => (pid, ExitStatus::Exited(code)),
                Ok(WaitStatus::Signaled(pid, signal, core_dumped)) => {
                    (pid, ExitStatus::Signaled { signal: signal as i32, core_dumped })
                }
                Err(Errno::EINTR) => continue,
                Ok(WaitStatus::StillAlive) | Err(_) => return,
                Ok(_) => continue,
            };
            if let Some(sender) = waiting.remove(&pid.as_raw()) {
                // The starter may have given up on it.
                let _ = sender.send(status);
            }
        }
    }
}
