//! What clients write to a process.

use std::sync::{Arc, Mutex, PoisonError};

use nix::errno::Errno;

use super::fd::AsyncFile;
use super::wire::{ProcessInput, Size};
use crate::error::RpcError;

/// A process's stdin or terminal.
#[derive(Debug)]
pub struct Input {
    target: Mutex<Target>,
    /// Keeps the bytes of one call together; held while the process is slow to read.
    turn: tokio::sync::Mutex<()>,
    /// Wakes a blocked writer when the input is closed.
    closed: tokio::sync::Notify,
}

#[derive(Debug, Clone)]
enum Target {
    Closed,
    Pipe(Arc<AsyncFile>),
    Terminal(Arc<AsyncFile>),
}

impl Input {
    fn new(target: Target) -> Self {
        Self { target: Mutex::new(target), turn: tokio::sync::Mutex::default(), closed: tokio::sync::Notify::new() }
    }

    /// No stdin.
    pub fn closed() -> Self {
        Self::new(Target::Closed)
    }

    /// An open pipe.
    pub fn pipe(file: AsyncFile) -> Self {
        Self::new(Target::Pipe(Arc::new(file)))
    }

    /// A terminal.
    pub fn terminal(file: Arc<AsyncFile>) -> Self {
        Self::new(Target::Terminal(file))
    }

    fn target(&self) -> Target {
        self.target.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Writes all of `input`, waiting while the process does not read.
    ///
    /// # Errors
    /// `failed_precondition` when the process has no such input or has closed it, `invalid_argument` when `input` is empty.
    pub async fn send(&self, input: &ProcessInput) -> Result<(), RpcError> {
        let _turn = self.turn.lock().await;
        let mut closed = std::pin::pin!(self.closed.notified());
        closed.as_mut().enable();
        let (file, data) = match (self.target(), &input.stdin, &input.pty) {
            (Target::Pipe(file), Some(data), _) => (file, data),
            (Target::Terminal(file), _, Some(data)) => (file, data),
            (Target::Terminal(_), Some(_), None) => {
                return Err(RpcError::failed_precondition("the process has a terminal: send 'pty' input, not 'stdin'"))
            }
            (Target::Pipe(_), None, Some(_)) => {
                return Err(RpcError::failed_precondition("the process has no terminal: send 'stdin' input, not 'pty'"))
            }
            (Target::Closed, _, _) => return Err(RpcError::failed_precondition("the process's stdin is not open")),
            (_, None, None) => return Err(RpcError::invalid_argument("field 'input' has neither 'stdin' nor 'pty'")),
        };
        let written = tokio::select! {
            written = file.write_all(data) => written,
            () = closed => return Err(RpcError::failed_precondition("the process's stdin was closed meanwhile")),
        };
        written.map_err(|error| match Errno::try_from(error) {
            Ok(Errno::EPIPE | Errno::EIO) => RpcError::failed_precondition("the process has closed its stdin"),
            Ok(errno) => RpcError::internal(format!("cannot write to the process: {errno}")),
            Err(error) => RpcError::internal(format!("cannot write to the process: {error:?}")),
        })
    }

    /// Closes stdin: the process reads its end. Closing it again is fine.
    ///
    /// # Errors
    /// `failed_precondition` for a terminal, which ends its input with a character.
    pub fn close(&self) -> Result<(), RpcError> {
        let mut target = self.target.lock().unwrap_or_else(PoisonError::into_inner);
        if let Target::Terminal(_) = *target {
            return Err(RpcError::failed_precondition(
                "cannot close stdin for PTY process — send Ctrl+D (0x04) instead",
            ));
        }
        *target = Target::Closed;
        drop(target);
        self.closed.notify_waiters();
        Ok(())
    }

    /// The process has ended: lets go of the descriptor.
    pub fn release(&self) {
        *self.target.lock().unwrap_or_else(PoisonError::into_inner) = Target::Closed;
        self.closed.notify_waiters();
    }

    /// Resizes the terminal.
    ///
    /// # Errors
    /// `failed_precondition` when the process has none.
    pub fn resize(&self, size: Size) -> Result<(), RpcError> {
        match self.target() {
            Target::Terminal(file) => {
                file.resize(size).map_err(|error| RpcError::internal(format!("cannot resize the terminal: {error}")))
            }
            _ => Err(RpcError::failed_precondition("the process has no terminal")),
        }
    }
}
