//! fork and exec.
//!
//! Everything the child needs is prepared before the fork, because between fork and exec it may only make
//! async-signal-safe calls: other threads' locks, the allocator's included, are frozen in whatever state they were in. A failure
//! in the child comes back through a close-on-exec pipe; its silent closing means the exec succeeded.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::unistd::{pipe2, Pid};

use crate::users::User;

/// A program to run, ready for the fork.
#[derive(Debug)]
pub struct Program {
    /// Paths to try in order, as a search of PATH does.
    candidates: Vec<CString>,
    argv: Vec<CString>,
    envp: Vec<CString>,
    cwd: CString,
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
}

/// The step at which a child failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Step {
    /// Session, descriptors, signals.
    Setup = 1,
    /// Taking on the user's identity.
    User = 2,
    /// Changing to the working directory.
    Cwd = 3,
    /// Executing the program.
    Exec = 4,
}

/// Why a child could not become the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChildError {
    /// Where it failed.
    pub step: Step,
    /// With which error.
    pub errno: Errno,
}

/// The soft and hard limit of open files that children get; `None` leaves ours.
pub type FileLimit = Option<(u64, u64)>;

impl Program {
    /// `args` are those after the program's name. A `command` without a slash is looked up in the `PATH` of `envs`.
    ///
    /// # Errors
    /// What is wrong with a string: a NUL byte, or `=` in a variable's name.
    pub fn new<'a>(
        command: &str,
        args: impl IntoIterator<Item = &'a String>,
        envs: impl IntoIterator<Item = (&'a String, &'a String)>,
        cwd: &Path,
        user: &User,
    ) -> Result<Self, String> {
        let text = |text: &[u8], what: &str| CString::new(text).map_err(|_| format!("{what} contains a NUL byte"));
        let mut argv = vec![text(command.as_bytes(), "the command")?];
        for arg in args {
            argv.push(text(arg.as_bytes(), "an argument")?);
        }
        let (mut envp, mut search) = (Vec::new(), String::new());
        for (name, value) in envs {
            if name.is_empty() || name.contains('=') {
                return Err(format!("'{name}' cannot be the name of an environment variable"));
            }
            if name == "PATH" {
                search.clone_from(value);
            }
            envp.push(text(format!("{name}={value}").as_bytes(), &format!("environment variable '{name}'"))?);
        }
        let candidates = if command.contains('/') {
            vec![argv[0].clone()]
        } else {
            let join = |dir: &str| Path::new(if dir.is_empty() { "." } else { dir }).join(command);
            search.split(':').filter_map(|dir| CString::new(join(dir).as_os_str().as_bytes()).ok()).collect()
        };
        Ok(Self {
            candidates,
            argv,
            envp,
            cwd: text(cwd.as_os_str().as_bytes(), "the working directory")?,
            uid: user.uid,
            gid: user.gid,
            groups: user.groups.clone(),
        })
    }

    /// Forks. The child becomes the leader of a new session, with `stdio` as its descriptors 0, 1 and 2 and, if `terminal`,
    /// descriptor 0 as its controlling terminal. Returns its pid and the pipe on which [`read_outcome`] finds how it went.
    ///
    /// # Errors
    /// No process or descriptor left.
    pub fn fork(&self, stdio: [RawFd; 3], terminal: bool, files: FileLimit) -> io::Result<(Pid, OwnedFd)> {
        let (outcome, report) = pipe2(OFlag::O_CLOEXEC)?;
        let pointers = |strings: &[CString]| -> Vec<*const libc::c_char> {
            strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect()
        };
        let (argv, envp) = (pointers(&self.argv), pointers(&self.envp));
        // SAFETY: the child only makes the async-signal-safe calls of `become_program` and then exits or is replaced; everything it
        // touches was allocated above and stays alive in its copy of our memory.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                let error = self.become_program(stdio, terminal, files, &argv, &envp);
                let message = (error.errno as i32).to_ne_bytes();
                let message = [error.step as u8, message[0], message[1], message[2], message[3]];
                // SAFETY: writes five bytes of a live array to a descriptor we own, then leaves without running destructors.
                unsafe {
                    libc::write(report.as_raw_fd(), message.as_ptr().cast(), message.len());
                    libc::_exit(127)
                }
            }
            pid => Ok((Pid::from_raw(pid), outcome)),
        }
    }

    /// In the child: async-signal-safe calls only. Returns only on failure.
    fn become_program(
        &self,
        stdio: [RawFd; 3],
        terminal: bool,
        files: FileLimit,
        argv: &[*const libc::c_char],
        envp: &[*const libc::c_char],
    ) -> ChildError {
        let fail = |step| ChildError { step, errno: Errno::last() };
        if !set_up(stdio, terminal, files) {
            return fail(Step::Setup);
        }
        if !take_identity(self.uid, self.gid, &self.groups) {
            return fail(Step::User);
        }
        // SAFETY: a valid C string.
        if unsafe { libc::chdir(self.cwd.as_ptr()) } != 0 {
            return fail(Step::Cwd);
        }
        exec_first(&self.candidates, argv, envp);
        fail(Step::Exec)
    }
}

/// The kernel's own form of a signal's action (`struct sigaction` of Linux on x86_64 and aarch64). All zero: the default one.
#[repr(C)]
#[derive(Default)]
struct KernelSigaction {
    handler: usize,
    flags: libc::c_ulong,
    restorer: usize,
    mask: u64,
}

/// A new session, the descriptors, default signal handling, the limits.
fn set_up(stdio: [RawFd; 3], terminal: bool, files: FileLimit) -> bool {
    // SAFETY: plain system calls on values of our own; all async-signal-safe. The signal set is initialised by sigemptyset.
    unsafe {
        if libc::setsid() == -1 {
            return false;
        }
        // Sources are never below 3 (main makes sure 0..=2 are open), so no dup2 overwrites a later source.
        for (target, source) in stdio.into_iter().enumerate() {
            if libc::dup2(source, target as RawFd) == -1 {
                return false;
            }
        }
        if terminal && libc::ioctl(0, libc::TIOCSCTTY, 0) == -1 {
            return false;
        }
        // Our descriptors are close-on-exec already; this also covers any a library might open without it.
        libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
        // An ignored signal stays ignored across exec, and Rust's runtime ignores SIGPIPE. Asked of the kernel itself, as the
        // C library refuses to touch the two signals it keeps for itself. SIGKILL and SIGSTOP cannot be set; that is fine.
        let default = KernelSigaction::default();
        for signal in 1..=libc::SIGRTMAX() {
            libc::syscall(libc::SYS_rt_sigaction, signal, &default, ptr::null::<KernelSigaction>(), size_of::<u64>());
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, ptr::null_mut());
        if let Some((soft, hard)) = files {
            let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
        libc::umask(0o022);
        true
    }
}

/// Raw system calls: the C library's wrappers signal every other thread of the process, which the child does not have.
fn take_identity(uid: u32, gid: u32, groups: &[u32]) -> bool {
    // SAFETY: plain system calls; `groups` is valid for its length.
    unsafe {
        if libc::geteuid() != 0 {
            // Debug mode as an ordinary user can only run processes as itself; the kernel refuses anything else here.
            return libc::syscall(libc::SYS_setresuid, uid, uid, uid) == 0;
        }
        libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) == 0
            && libc::syscall(libc::SYS_setresgid, gid, gid, gid) == 0
            && libc::syscall(libc::SYS_setresuid, uid, uid, uid) == 0
    }
}

/// Tries the candidates as execvp does: a missing one is passed over, and a forbidden one is reported only if nothing else works.
fn exec_first(candidates: &[CString], argv: &[*const libc::c_char], envp: &[*const libc::c_char]) {
    let mut denied = false;
    for path in candidates {
        let path: &CStr = path;
        // SAFETY: a valid C string and two null-terminated arrays of valid C strings.
        unsafe { libc::execve(path.as_ptr(), argv.as_ptr(), envp.as_ptr()) };
        match Errno::last() {
            Errno::ENOENT | Errno::ENOTDIR => {}
            Errno::EACCES => denied = true,
            _ => return,
        }
    }
    let errno = if denied { Errno::EACCES } else { Errno::ENOENT };
    errno.set();
}

/// What the bytes of the outcome pipe, read to its end, say.
///
/// # Errors
/// The child's failure.
pub fn read_outcome(message: &[u8]) -> Result<(), ChildError> {
    let [step, a, b, c, d] = *message else { return Ok(()) };
    let step = match step {
        1 => Step::Setup,
        2 => Step::User,
        3 => Step::Cwd,
        _ => Step::Exec,
    };
    Err(ChildError { step, errno: Errno::from_raw(i32::from_ne_bytes([a, b, c, d])) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn program(command: &str, envs: &[(&str, &str)]) -> Result<Program, String> {
        let user =
            User { name: "u".into(), uid: 1, gid: 1, groups: vec![1], home: "/".into(), shell: "/bin/sh".into() };
        let envs: BTreeMap<String, String> = envs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        Program::new(command, &["-x".to_owned()], &envs, Path::new("/"), &user)
    }

    #[test]
    fn searches_the_path_of_the_child() {
        let found = program("ls", &[("PATH", "/a::/b")]).expect("valid");
        assert_eq!(found.candidates, [c"/a/ls".to_owned(), c"./ls".to_owned(), c"/b/ls".to_owned()]);
        assert_eq!(program("./ls", &[("PATH", "/a")]).expect("valid").candidates, [c"./ls".to_owned()]);
    }

    #[test]
    fn refuses_strings_that_cannot_be_passed() {
        assert!(program("a\0b", &[]).is_err());
        assert!(program("a", &[("A=B", "x")]).is_err());
        assert!(program("a", &[("A", "x\0y")]).is_err());
    }

    #[test]
    fn outcome_round_trips() {
        assert_eq!(read_outcome(&[]), Ok(()));
        let errno = (Errno::ENOENT as i32).to_ne_bytes();
        let error = read_outcome(&[3, errno[0], errno[1], errno[2], errno[3]]).expect_err("failed");
        assert_eq!(error, ChildError { step: Step::Cwd, errno: Errno::ENOENT });
    }
}
