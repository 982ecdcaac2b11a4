//! The socket.

use std::fs::File;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::FlockOperation;
use tokio::net::UnixListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::control::{connection, Service};
use crate::image::remove_file;
use crate::{Code, Error};

/// Operations that move many bytes and run at once, over all connections.
const MAX_BULK: usize = 4;
/// Connections at once.
const MAX_CONNECTIONS: usize = 64;
/// Pause after a failed accept (no file descriptors left), so as not to spin.
const RETRY: Duration = Duration::from_millis(100);

/// A listening control socket. Its file is removed when the server is dropped.
pub struct Server {
    path: PathBuf,
    listener: UnixListener,
    /// Locked as long as the server lives.
    _lock: File,
}

impl Server {
    /// Takes the socket's lock: one daemon per socket. What a killed predecessor left is removed.
    ///
    /// # Errors
    /// [`Code::Busy`] if another daemon runs; the directory is missing or not writable.
    pub fn lock(path: &Path) -> Result<File, Error> {
        let mut name = path.as_os_str().to_owned();
        name.push(".lock");
        let failed = |e: io::Error| Error::io(format_args!("locking {}", path.display()), &e);
        let lock = File::options().write(true).create(true).truncate(false).open(&name).map_err(failed)?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(Error::new(Code::Busy, format!("another daemon serves {}", path.display())))
            }
            Err(error) => return Err(failed(error.into())),
        }
        remove_file(path).map_err(failed)?;
        Ok(lock)
    }

    /// Listens. Only the owner of the process may connect.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn bind(path: &Path, lock: File) -> Result<Self, Error> {
        let failed = |e: io::Error| Error::io(format_args!("listening on {}", path.display()), &e);
        // Under a name nobody knows until it has the right mode.
        let mut hidden = path.as_os_str().to_owned();
        hidden.push(".new");
        let hidden = PathBuf::from(hidden);
        remove_file(&hidden).map_err(failed)?;
        let listener = UnixListener::bind(&hidden).map_err(failed)?;
        std::fs::set_permissions(&hidden, PermissionsExt::from_mode(0o600)).map_err(failed)?;
        std::fs::rename(&hidden, path).map_err(failed)?;
        Ok(Self { path: path.to_owned(), listener, _lock: lock })
    }

    /// Serves clients, until dropped.
    pub async fn serve(&self, service: Arc<Service>) {
        let bulk = Arc::new(Semaphore::new(MAX_BULK));
        let mut connections = JoinSet::new();
        loop {
            while connections.try_join_next().is_some() {}
            if connections.len() >= MAX_CONNECTIONS {
                connections.join_next().await;
            }
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    connections.spawn(connection::serve(stream, service.clone(), bulk.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, "accepting a control connection failed");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(error) = remove_file(&self.path) {
            tracing::warn!(socket = %self.path.display(), %error, "the control socket stays behind");
        }
    }
}
