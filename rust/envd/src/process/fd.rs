//! Non-blocking pipes and terminals.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{fcntl, FcntlArg, OFlag};
use nix::pty::{openpty, Winsize};
use nix::unistd::{pipe2, read, write};
use tokio::io::unix::AsyncFd;

use super::wire::Size;

/// Our end of a pipe or a terminal.
#[derive(Debug)]
pub struct AsyncFile(AsyncFd<OwnedFd>);

impl AsyncFile {
    /// # Errors
    /// When the descriptor cannot be made non-blocking or registered.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let flags = OFlag::from_bits_retain(fcntl(&fd, FcntlArg::F_GETFL)?);
        fcntl(&fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        // SAFETY: the OwnedFd moves in, nothing else closes or replaces it, and it stays registered until the drop.
        unsafe { AsyncFd::register(fd) }.map(Self).map_err(io::Error::from)
    }

    /// Reads what is there; 0 is the end. A terminal whose other side is closed reads as ended.
    ///
    /// # Errors
    /// Those of `read(2)`.
    pub async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut ready = self.0.readable().await?;
            match ready.try_io(|fd| read(fd.get_ref(), buffer).map_err(io::Error::from)) {
                Ok(Err(error)) if error.raw_os_error() == Some(libc::EIO) => return Ok(0),
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(result) => return result,
                Err(_would_block) => {}
            }
        }
    }

    /// Writes everything, waiting while the other side is slow.
    ///
    /// # Errors
    /// Those of `write(2)`; `EPIPE` when nobody reads any more.
    pub async fn write_all(&self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let mut ready = self.0.writable().await?;
            match ready.try_io(|fd| write(fd.get_ref(), data).map_err(io::Error::from)) {
                Ok(Ok(written)) => data = &data[written..],
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(error)) => return Err(error),
                Err(_would_block) => {}
            }
        }
        Ok(())
    }

    /// Bytes that can be read right now.
    pub fn pending(&self) -> usize {
        let mut count: libc::c_int = 0;
        // SAFETY: FIONREAD stores one int through the pointer, which is valid for the call.
        let result = unsafe { libc::ioctl(self.0.get_ref().as_raw_fd(), libc::FIONREAD, &mut count) };
        if result == 0 {
            usize::try_from(count).unwrap_or(0)
        } else {
            0
        }
    }

    /// Sets the size of a terminal.
    ///
    /// # Errors
    /// Those of `TIOCSWINSZ`.
    pub fn resize(&self, size: Size) -> io::Result<()> {
        let size = winsize(size);
        // SAFETY: TIOCSWINSZ reads one winsize through the pointer, which is valid for the call.
        let result = unsafe { libc::ioctl(self.0.get_ref().as_raw_fd(), libc::TIOCSWINSZ, &size) };
        Errno::result(result).map(drop).map_err(io::Error::from)
    }
}

/// A pipe whose ends no other child inherits; owned by `uid`, so that the user can reopen it as /dev/stdout. Reading end first.
///
/// # Errors
/// Too many open files.
pub fn pipe_for(uid: u32) -> io::Result<(OwnedFd, OwnedFd)> {
    let (reader, writer) = pipe2(OFlag::O_CLOEXEC)?;
    own(&reader, uid)?;
    Ok((reader, writer))
}

/// A new terminal of this size, owned by `uid`: our side, the process's side.
///
/// # Errors
/// No terminal left, too many open files.
pub fn terminal_for(uid: u32, size: Option<Size>) -> io::Result<(OwnedFd, OwnedFd)> {
    let size = winsize(size.unwrap_or(Size { cols: 80, rows: 24 }));
    let pair = openpty(Some(&size), None)?;
    for fd in [&pair.master, &pair.slave] {
        fcntl(fd, FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))?;
    }
    own(&pair.slave, uid)?;
    Ok((pair.master, pair.slave))
}

/// Changing an owner needs privileges; without them (debug mode) the process runs as ourselves anyway.
fn own(fd: impl AsFd, uid: u32) -> io::Result<()> {
    if !nix::unistd::geteuid().is_root() {
        return Ok(());
    }
    nix::unistd::fchown(fd, Some(nix::unistd::Uid::from_raw(uid)), None).map_err(io::Error::from)
}

fn winsize(size: Size) -> Winsize {
    let clamp = |value: u32| u16::try_from(value).unwrap_or(u16::MAX);
    Winsize { ws_row: clamp(size.rows), ws_col: clamp(size.cols), ws_xpixel: 0, ws_ypixel: 0 }
}
