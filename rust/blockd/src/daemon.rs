//! Putting the daemon together.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
use tokio::signal::unix::{signal, SignalKind};

use crate::cache::{Cache, CacheOptions};
use crate::control::{Events, Server, Service, Sources, Targets};
use crate::fuse::{clean_stale, Mount, Session};
use crate::image::{Layers, Table};
use crate::{privileges, ublk, Code, Error};

/// How the command line looks.
pub const USAGE: &str = "\
Usage: aenv-blockd --socket PATH --mount DIR --cache DIR --cache-bytes N [--no-ublk]

  --socket PATH      where to listen for control connections
  --mount DIR        where attached images appear as files
  --cache DIR        where blocks of remote layers are kept
  --cache-bytes N    how much of them at most
  --no-ublk          never make block devices";

/// Threads for control operations, which mostly wait for disks.
const MAX_BLOCKING: usize = 256;
/// How long an operation that still runs may hold up the end of the daemon.
const LAST_WAIT: Duration = Duration::from_secs(5);

/// The command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Control socket.
    pub socket: PathBuf,
    /// Mount point.
    pub mount: PathBuf,
    /// Directory of the block cache.
    pub cache: PathBuf,
    /// Its bound.
    pub cache_bytes: u64,
    /// Whether block devices may be used.
    pub ublk: bool,
}

impl Options {
    /// Reads the command line; nothing if help was asked for.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(args: impl Iterator<Item = OsString>) -> Result<Option<Self>, lexopt::Error> {
        use lexopt::prelude::*;
        let (mut socket, mut mount, mut cache, mut cache_bytes, mut ublk) = (None, None, None, None, true);
        let mut parser = lexopt::Parser::from_args(args);
        while let Some(arg) = parser.next()? {
            match arg {
                Long("socket") => socket = Some(PathBuf::from(parser.value()?)),
                Long("mount") => mount = Some(PathBuf::from(parser.value()?)),
                Long("cache") => cache = Some(PathBuf::from(parser.value()?)),
                Long("cache-bytes") => cache_bytes = Some(parser.value()?.parse()?),
                Long("no-ublk") => ublk = false,
                Long("help") | Short('h') => return Ok(None),
                arg => return Err(arg.unexpected()),
            }
        }
        let needed = |path: Option<PathBuf>, name: &str| path.ok_or_else(|| format!("--{name} is needed"));
        Ok(Some(Self {
            socket: needed(socket, "socket")?,
            mount: needed(mount, "mount")?,
            cache: needed(cache, "cache")?,
            cache_bytes: cache_bytes.ok_or("--cache-bytes is needed")?,
            ublk,
        }))
    }
}

/// Runs the daemon until it is told to end by SIGTERM or SIGINT.
///
/// # Errors
/// It cannot start.
pub fn run(options: &Options) -> Result<(), Error> {
    // While there is one thread only: capabilities belong to threads, and later ones inherit.
    privileges::drop_all_but_needed()?;
    raise_file_limit();
    let lock = Server::lock(&options.socket)?;
    let dir = real_dir(&options.mount)?;
    let removed = clean_stale(&dir)?;
    if removed > 0 {
        tracing::info!(dir = %dir.display(), removed, "removed what a killed daemon left mounted");
    }
    let table = Arc::new(Table::default());
    let mount = Mount::new(&dir)?;
    let fuse = Session::start(mount.device(), table.clone())?;
    let ublk = match options.ublk {
        true => ublk::Driver::probe(),
        false => Err("switched off by --no-ublk".to_owned()),
    };
    let targets = Targets { mount: dir, fuse, ublk };
    let cache = Cache::open(CacheOptions::new(&options.cache, options.cache_bytes))
        .map_err(|e| Error::caused(Code::Io, "opening the block cache", &e))?;
    let events = Arc::new(Events::default());
    let layers = Arc::new(Layers::new(Box::new(Sources::new(cache, events.clone()))));
    let service = Arc::new(Service::new(table, layers, targets, events));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(MAX_BLOCKING)
        .thread_name("control")
        .build()
        .map_err(|e| Error::io("starting the control runtime", &e))?;
    let served = runtime.block_on(serve(options, lock, service.clone()));
    runtime.shutdown_timeout(LAST_WAIT);
    service.end();
    drop(mount);
    served
}

async fn serve(options: &Options, lock: std::fs::File, service: Arc<Service>) -> Result<(), Error> {
    let failed = |e: std::io::Error| Error::io("waiting for signals", &e);
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let server = Server::bind(&options.socket, lock)?;
    tracing::info!(socket = %options.socket.display(), mount = %options.mount.display(), "ready");
    tokio::select! {
        () = server.serve(service) => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("ending");
    Ok(())
}

/// The mount point without symbolic links. It is made if it is missing, and may be a dead mount.
fn real_dir(dir: &Path) -> Result<PathBuf, Error> {
    let failed = |e: std::io::Error| Error::io(format_args!("mount point {}", dir.display()), &e);
    let absolute = std::path::absolute(dir).map_err(failed)?;
    let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) else {
        return Err(Error::invalid(format!("mount point {} is not a directory of its own", dir.display())));
    };
    std::fs::create_dir_all(parent).map_err(failed)?;
    let real = parent.canonicalize().map_err(failed)?.join(name);
    match std::fs::create_dir(&real) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(failed(error)),
        _ => Ok(real),
    }
}

/// Each image has a few files open, and each layer one.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Option<Options>, String> {
        Options::parse(line.split(' ').map(OsString::from)).map_err(|e| e.to_string())
    }

    #[test]
    fn the_command_line() {
        let options = parse("--socket /s --mount=/m --cache /c --cache-bytes 5 --no-ublk").expect("valid");
        let expected =
            Options { socket: "/s".into(), mount: "/m".into(), cache: "/c".into(), cache_bytes: 5, ublk: false };
        assert_eq!(options, Some(expected));
        assert_eq!(parse("--help"), Ok(None));
        assert!(parse("--mount /m --cache /c --cache-bytes 5").expect_err("missing").contains("--socket is needed"));
        assert!(parse("--cache-bytes x").is_err());
    }
}
