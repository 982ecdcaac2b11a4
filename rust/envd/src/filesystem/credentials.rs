//! File-system work with the permissions of the effective user.
//!
//! envd is root, its clients act as some user of the guest. What that user may not read, write or remove must stay
//! out of reach through envd too, so the kernel does the checking: the thread that does the work takes on the user's
//! effective ids and supplementary groups, and gives them back afterwards.
//!
//! Linux keeps credentials per thread; it is the C library that spreads a `setuid` over all of them. rustix's
//! `set_thread_*` are the bare system calls and change the calling thread alone, so other requests never notice.
//! Leaving euid 0 also clears the thread's effective capabilities (capabilities(7), "Effect of user ID changes on
//! capabilities"): no DAC override, no root-reserved disk blocks, no ptrace shortcut into other users' /proc
//! entries. Real and saved ids stay 0, so the way back needs no privilege and the user cannot signal the thread.
//!
//! A thread inherits the credentials of the one that creates it. Work passed to [`as_user`] must therefore start
//! neither threads nor tasks.

use std::io;

use rustix::process::{getegid, geteuid, getgroups, Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use super::error::{FsError, FsErrorKind};
use crate::users::User;

/// Runs `work` on a thread of the blocking pool with the permissions of `user`.
///
/// # Errors
/// What `work` returns; `internal` when the credentials cannot be taken on or the pool is shutting down.
pub async fn run_as<T, F>(user: &User, work: F) -> Result<T, FsError>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, FsError> + Send + 'static,
{
    let user = user.clone();
    match tokio::task::spawn_blocking(move || as_user(&user, work)).await {
        Ok(result) => result,
        Err(error) => Err(FsError::new(FsErrorKind::Internal, format!("file-system worker failed: {error}"))),
    }
}

/// Runs `work` on this thread with the permissions of `user`. Blocks; `work` must start neither threads nor tasks.
///
/// # Errors
/// What `work` returns; `internal` when the credentials cannot be taken on (envd is not root).
pub fn as_user<T>(user: &User, work: impl FnOnce() -> Result<T, FsError>) -> Result<T, FsError> {
    let refused = |error: io::Error| {
        FsError::new(FsErrorKind::Internal, format!("cannot act as user '{}': {error}; is envd root?", user.name))
    };
    let _own = Borrowed::take(user).map_err(refused)?;
    work()
}

/// The thread's own credentials, put back when this is dropped, also by a panic in the work.
struct Borrowed {
    own: Option<(Uid, Gid, Vec<Gid>)>,
}

impl Borrowed {
    fn take(user: &User) -> io::Result<Self> {
        let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
        // The same user already. This is root's case, who may do everything, and that of an envd under test.
        if uid == geteuid() {
            return Ok(Self { own: None });
        }
        let groups: Vec<Gid> = user.groups.iter().copied().map(Gid::from_raw).collect();
        // From here on every way out restores, even if a later step fails.
        let own = Self { own: Some((geteuid(), getegid(), getgroups()?)) };
        set_thread_groups(&groups)?;
        set_thread_res_gid(None, gid, None)?;
        set_thread_res_uid(None, uid, None)?;
        Ok(own)
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        let Some((uid, gid, groups)) = self.own.take() else { return };
        // The uid first: returning to 0 restores the capabilities that the other two steps need.
        let restored = set_thread_res_uid(None, uid, None)
            .and_then(|()| set_thread_res_gid(None, gid, None))
            .and_then(|()| set_thread_groups(&groups));
        if restored.is_err() {
            // A pool thread with another user's credentials would serve the next request with them. The kernel
            // fails these calls only when it cannot allocate a few bytes; there is no safe way to go on.
            std::process::abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    fn nobody() -> User {
        User {
            name: "nobody".into(),
            uid: 65534,
            gid: 65534,
            groups: vec![65534],
            home: "/".into(),
            shell: "/bin/sh".into(),
        }
    }

    fn is_root() -> bool {
        geteuid().is_root()
    }

    #[test]
    fn the_kernel_checks_the_user_not_root() {
        if !is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let secret = dir.path().join("secret");
        fs::write(&secret, "s").unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
        let own = dir.path().join("own");
        as_user(&nobody(), || {
            assert_eq!(fs::read(&secret).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
            fs::write(&own, "o").unwrap();
            Ok(())
        })
        .unwrap();
        assert_eq!(fs::read(&secret).unwrap(), b"s");
        let metadata = fs::metadata(&own).unwrap();
        assert_eq!((metadata.uid(), metadata.gid()), (65534, 65534));
    }

    #[test]
    fn other_threads_keep_their_credentials_and_a_panic_restores() {
        if !is_root() {
            return;
        }
        let (entered_tx, entered_rx) = std::sync::mpsc::channel();
        let (leave_tx, leave_rx) = std::sync::mpsc::channel::<()>();
        let worker = std::thread::spawn(move || {
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                as_user(&nobody(), || -> Result<(), FsError> {
                    entered_tx.send((geteuid().as_raw(), getgroups().unwrap())).unwrap();
                    leave_rx.recv().unwrap();
                    panic!("deliberate")
                })
            }));
            assert!(caught.is_err());
            (geteuid().as_raw(), getegid().as_raw())
        });
        assert_eq!(entered_rx.recv().unwrap(), (65534, vec![Gid::from_raw(65534)]));
        assert!(geteuid().is_root());
        leave_tx.send(()).unwrap();
        assert_eq!(worker.join().unwrap(), (0, 0));
    }
}
