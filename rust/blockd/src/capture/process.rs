//! The process whose memory is captured or restored, held so that its number cannot come to mean another.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fs::{openat, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{pidfd_open, Pid, PidfdFlags};

use super::sys;
use super::CaptureError;

/// The most that is read of one of `/proc/<pid>`'s text files.
const MAX_TEXT: u64 = 16 << 20;

/// A process.
///
/// `process_vm_readv` takes a number, which the kernel may give to another process once this one is dead and waited for. While
/// the pidfd says that it lives, the number was its own all along: so whoever has read by number asks
/// [`Process::check_alive`] before believing what was read. Files under `/proc/<pid>` are opened through one handle of that
/// directory, which never means another process.
#[derive(Debug)]
pub struct Process {
    number: u32,
    pid: Pid,
    pidfd: OwnedFd,
    dir: OwnedFd,
}

impl Process {
    /// Takes hold of a process; `start_time` (field 22 of `/proc/<pid>/stat`, in clock ticks) tells it from an earlier or later
    /// one of the same number.
    pub fn open(number: u32, start_time: Option<u64>) -> Result<Self, CaptureError> {
        let missing = CaptureError::NoProcess(number);
        let Some(pid) = i32::try_from(number).ok().and_then(Pid::from_raw) else { return Err(missing) };
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            // EINVAL and ENOENT: a thread's number, not a process's.
            Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => return Err(missing),
            Err(e) => return Err(CaptureError::Process { pid: number, what: "a handle", source: e.into() }),
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = openat(rustix::fs::CWD, format!("/proc/{number}"), flags, Mode::empty())
            .map_err(|_| CaptureError::NoProcess(number))?;
        let process = Self { number, pid, pidfd, dir };
        let found = parse_start_time(&process.text("stat")?);
        // Alive now, so the directory opened after the pidfd is this process's.
        process.check_alive()?;
        match (start_time, found) {
            (Some(expected), Some(found)) if found != expected => {
                Err(CaptureError::OtherProcess { pid: number, expected, found })
            }
            (Some(_), None) => {
                let source = io::ErrorKind::InvalidData.into();
                Err(CaptureError::Process { pid: number, what: "the start time", source })
            }
            _ => Ok(process),
        }
    }

    /// Fails if the process has ended; if not, everything read by its number before this call was its own.
    pub fn check_alive(&self) -> Result<(), CaptureError> {
        let mut ended = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            return match poll(&mut ended, Some(&now)) {
                Ok(0) => Ok(()),
                Ok(_) => Err(CaptureError::Died(self.number)),
                Err(Errno::INTR) => continue,
                Err(e) => Err(self.failed("its state", e.into())),
            };
        }
    }

    /// Opens a file of `/proc/<pid>`.
    pub fn file(&self, name: &'static str) -> Result<File, CaptureError> {
        let file = openat(&self.dir, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        file.map(File::from).map_err(|e| self.failed(name, e.into()))
    }

    /// The contents of a text file of `/proc/<pid>`.
    pub fn text(&self, name: &'static str) -> Result<Vec<u8>, CaptureError> {
        let mut text = Vec::new();
        let read = self.file(name)?.take(MAX_TEXT).read_to_end(&mut text);
        read.map_err(|e| self.failed(name, e))?;
        Ok(text)
    }

    /// Fills `buf` with the bytes of `ranges` (address, length), one after another. They must be as long together as it is.
    pub fn read(&self, ranges: &[(u64, u64)], buf: &mut [u8]) -> Result<(), CaptureError> {
        self.copy(ranges, buf.len(), |done, rest| sys::process_vm_readv(self.pid, &mut buf[done..], rest))
    }

    /// The reverse: writes `buf` to `ranges`, one after another. Asks first whether the process lives: what is written by number
    /// must not reach another one, which would take the end of this one, its wait and the whole range of numbers since.
    pub fn write(&self, ranges: &[(u64, u64)], buf: &[u8]) -> Result<(), CaptureError> {
        self.check_alive()?;
        self.copy(ranges, buf.len(), |done, rest| sys::process_vm_writev(self.pid, &buf[done..], rest))
    }

    /// Copies `len` bytes from or to `ranges`. `copy` takes the bytes that are done and the ranges that are not.
    fn copy(
        &self,
        ranges: &[(u64, u64)],
        len: usize,
        mut copy: impl FnMut(usize, &[(u64, u64)]) -> io::Result<usize>,
    ) -> Result<(), CaptureError> {
        let mut rest = ranges.to_vec();
        let (mut first, mut done) = (0, 0);
        while let (true, Some(&(address, _))) = (done < len, rest.get(first)) {
            let mut copied = match copy(done, &rest[first..]) {
                // Nothing copied and no reason given: the page is not there.
                Ok(0) => return Err(self.unreadable(address)),
                Ok(copied) => copied,
                Err(e) => match e.raw_os_error() {
                    Some(libc::EINTR) => continue,
                    Some(libc::EFAULT) => return Err(self.unreadable(address)),
                    _ => return Err(self.failed("the memory", e)),
                },
            };
            done += copied;
            while let (true, Some((address, len))) = (copied > 0, rest.get_mut(first)) {
                let step = (copied as u64).min(*len);
                (*address, *len) = (*address + step, *len - step);
                copied -= step as usize;
                first += usize::from(*len == 0);
            }
        }
        self.check_alive()
    }

    /// An error of the kernel's, as what it means for this process.
    pub fn failed(&self, what: &'static str, source: io::Error) -> CaptureError {
        if let Err(died @ CaptureError::Died(_)) = self.check_alive() {
            return died;
        }
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => CaptureError::NotPermitted { pid: self.number, what },
            Some(libc::ESRCH) => CaptureError::Died(self.number),
            _ => CaptureError::Process { pid: self.number, what, source },
        }
    }

    fn unreadable(&self, address: u64) -> CaptureError {
        match self.check_alive() {
            Err(died) => died,
            Ok(()) => CaptureError::Unreadable { pid: self.number, address },
        }
    }
}

/// Field 22 of `/proc/<pid>/stat`. The second field, the name in parentheses, may itself hold spaces and parentheses.
fn parse_start_time(stat: &[u8]) -> Option<u64> {
    let after_name = stat.iter().rposition(|&byte| byte == b')')?;
    let fields = std::str::from_utf8(stat.get(after_name + 1..)?).ok()?;
    fields.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_time_survives_a_hostile_name() {
        let stat =
            b"7 (a) R 1 (b) S 1 7 7 0 -1 4194560 100 0 0 0 3 4 0 0 20 0 1 0 123456 5000 100 18446744073709551615";
        assert_eq!(parse_start_time(stat), Some(123456));
        assert_eq!(parse_start_time(b"7 (a) S 1"), None);
        assert_eq!(parse_start_time(b""), None);
    }

    #[test]
    fn a_process_is_told_by_its_start_time() {
        let me = std::process::id();
        let started = parse_start_time(&Process::open(me, None).expect("me").text("stat").expect("stat"));
        Process::open(me, started).expect("the same");
        let wrong = Process::open(me, started.map(|ticks| ticks + 1)).expect_err("another");
        assert!(matches!(wrong, CaptureError::OtherProcess { .. }), "{wrong}");
        for number in [0, u32::MAX, i32::MAX as u32] {
            assert!(matches!(Process::open(number, None), Err(CaptureError::NoProcess(_))));
        }
    }
}
