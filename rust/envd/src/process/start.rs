//! Starts a process and follows it to its end.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use super::fd::{pipe_for, terminal_for, AsyncFile};
use super::input::Input;
use super::output::{Output, Stream, MAX_CHUNK};
use super::spawn::{read_outcome, ChildError, Program, Step};
use super::table::{Process, Table, RETENTION};
use super::wire::{required, EndEvent, StartRequest};
use crate::error::RpcError;
use crate::paths;
use crate::reaper::ExitStatus;
use crate::state::{Settings, State};
use crate::users::User;

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// How long after its exit a process's output is still waited for when something else holds the pipe open. What the process
/// itself wrote is always delivered; this is for children that outlive it (`server &`), which must not hold up its end.
const ORPHAN_GRACE: Duration = Duration::from_millis(500);

/// Starts what `request` asks for as `user`; kills it after `timeout`. Must not be cancelled half-way: run it as a task.
///
/// # Errors
/// `invalid_argument` for a bad cwd, environment or program, `permission_denied`, `resource_exhausted`.
pub async fn start(
    request: StartRequest,
    user: User,
    timeout: Option<Duration>,
    state: Arc<State>,
) -> Result<Arc<Process>, RpcError> {
    let table = &state.processes;
    let config = required(request.process, "process")?;
    if config.cmd.is_empty() {
        return Err(RpcError::invalid_argument("field 'process.cmd' is required"));
    }
    let settings = state.settings();
    let cwd = working_directory(config.cwd.as_deref(), &user, &settings)?;
    let mut envs = environment(&user, &settings, &config.envs);
    if request.pty.is_some() {
        envs.entry("TERM".into()).or_insert_with(|| "xterm-256color".into());
    }
    let program = Program::new(&config.cmd, &config.args, &envs, &cwd, &user).map_err(RpcError::invalid_argument)?;

    let streams = match request.pty {
        Some(pty) => Streams::terminal(&user, pty.size),
        None => Streams::pipes(&user, request.stdin.unwrap_or(true)),
    };
    let Streams { ours, theirs, input, terminal } = streams.map_err(|error| exhausted("open its pipes", &error))?;
    let stdio = [theirs[0].as_raw_fd(), theirs[theirs.len() / 2].as_raw_fd(), theirs[theirs.len() - 1].as_raw_fd()];
    let mut outcome = None;
    let forked = table.reaper.spawn(|| {
        let (pid, pipe) = program.fork(stdio, terminal, table.files)?;
        outcome = Some(pipe);
        Ok(pid)
    });
    let (pid, exit) = forked.map_err(|error| exhausted("fork", &error))?;
    // The child has its own copies; ours would keep the pipes open after its end.
    drop(theirs);

    let pid = pid.as_raw().unsigned_abs();
    let process = Arc::new(Process::new(pid, config, request.tag, input));
    if let Err(error) = exec_outcome(outcome).await {
        return Err(start_error(error, &process.config.cmd, &cwd, &user));
    }
    table.insert(process.clone());
    tokio::spawn(follow(process.clone(), ours, exit, timeout, table.clone()));
    Ok(process)
}

/// The two sides of a process's descriptors.
struct Streams {
    /// What we read, and as what.
    ours: Vec<(Stream, Arc<AsyncFile>)>,
    /// One descriptor for all three, or one for each.
    theirs: Vec<OwnedFd>,
    input: Input,
    terminal: bool,
}

impl Streams {
    fn terminal(user: &User, size: Option<super::wire::Size>) -> std::io::Result<Self> {
        let (ours, theirs) = terminal_for(user.uid, size)?;
        let ours = Arc::new(AsyncFile::new(ours)?);
        let input = Input::terminal(ours.clone());
        Ok(Self { ours: vec![(Stream::Pty, ours)], theirs: vec![theirs], input, terminal: true })
    }

    fn pipes(user: &User, open_stdin: bool) -> std::io::Result<Self> {
        let (stdin, input) = if open_stdin {
            let (reader, writer) = pipe_for(user.uid)?;
            (reader, Input::pipe(AsyncFile::new(writer)?))
        } else {
            (nix::fcntl::open("/dev/null", OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())?, Input::closed())
        };
        let (stdout, their_stdout) = pipe_for(user.uid)?;
        let (stderr, their_stderr) = pipe_for(user.uid)?;
        let ours = vec![
            (Stream::Stdout, Arc::new(AsyncFile::new(stdout)?)),
            (Stream::Stderr, Arc::new(AsyncFile::new(stderr)?)),
        ];
        Ok(Self { ours, theirs: vec![stdin, their_stdout, their_stderr], input, terminal: false })
    }
}

/// Waits until the child has become the program or has failed to.
async fn exec_outcome(pipe: Option<OwnedFd>) -> Result<(), ChildError> {
    let Some(pipe) = pipe.and_then(|pipe| AsyncFile::new(pipe).ok()) else { return Ok(()) };
    let mut message = [0; 5];
    let mut length = 0;
    while let Ok(count @ 1..) = pipe.read(&mut message[length..]).await {
        length += count;
    }
    read_outcome(&message[..length])
}

fn start_error(error: ChildError, command: &str, cwd: &Path, user: &User) -> RpcError {
    let reason = error.errno.desc();
    match (error.step, error.errno) {
        (Step::Exec, _) => RpcError::invalid_argument(format!("error starting process '{command}': {reason}")),
        (Step::Cwd, Errno::ENOENT | Errno::ENOTDIR) => bad_cwd(cwd),
        (Step::Cwd, Errno::EACCES) => {
            RpcError::permission_denied(format!("user '{}' may not enter cwd '{}'", user.name, cwd.display()))
        }
        (Step::Cwd, _) => RpcError::invalid_argument(format!("cannot enter cwd '{}': {reason}", cwd.display())),
        (Step::User, _) => RpcError::permission_denied(format!("cannot run as user '{}': {reason}", user.name)),
        (Step::Setup, _) => RpcError::internal(format!("cannot set up process '{command}': {reason}")),
    }
}

fn exhausted(what: &str, error: &std::io::Error) -> RpcError {
    RpcError::resource_exhausted(format!("cannot start a process: {what}: {error}"))
}

fn bad_cwd(cwd: &Path) -> RpcError {
    let problem = if cwd.exists() { "is not a directory" } else { "does not exist" };
    RpcError::invalid_argument(format!("cwd '{}' {problem}", cwd.display()))
}

/// The requested directory, which must exist, or the first of default workdir, home and `/` that does.
fn working_directory(requested: Option<&str>, user: &User, settings: &Settings) -> Result<PathBuf, RpcError> {
    let workdir = settings.default_workdir.as_deref();
    if let Some(requested) = requested.filter(|cwd| !cwd.is_empty()) {
        let cwd = paths::resolve(requested, user, workdir)?;
        return if cwd.is_dir() { Ok(cwd) } else { Err(bad_cwd(&cwd)) };
    }
    let default = paths::resolve("", user, workdir)?;
    let usable = [default, user.home.clone()].into_iter().find(|dir| dir.is_dir());
    Ok(usable.unwrap_or_else(|| PathBuf::from("/")))
}

/// Later ones win: the user's basics, the sandbox's identity, the sandbox's variables, the request's. Nothing of ours.
fn environment(user: &User, settings: &Settings, requested: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let home = user.home.to_string_lossy();
    let basics = [
        ("PATH", Some(PATH)),
        ("HOME", Some(&*home)),
        ("USER", Some(&*user.name)),
        ("LOGNAME", Some(&*user.name)),
        ("SHELL", Some(&*user.shell)),
        ("E2B_SANDBOX", Some("true")),
        ("E2B_SANDBOX_ID", settings.sandbox_id.as_deref()),
        ("E2B_TEMPLATE_ID", settings.template_id.as_deref()),
    ];
    let mut envs: BTreeMap<String, String> =
        basics.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned()))).collect();
    for (name, value) in settings.envs.iter().chain(requested) {
        envs.insert(name.clone(), value.clone());
    }
    envs
}

/// Moves the process's output into its log until it has ended, then records the end.
async fn follow(
    process: Arc<Process>,
    ours: Vec<(Stream, Arc<AsyncFile>)>,
    exit: oneshot::Receiver<ExitStatus>,
    timeout: Option<Duration>,
    table: Arc<Table>,
) {
    let (exited, has_exited) = watch::channel(false);
    let mut pumps = tokio::task::JoinSet::new();
    for (stream, file) in &ours {
        pumps.spawn(pump(*stream, file.clone(), process.output.clone(), has_exited.clone()));
    }
    let status = exit_status(&process, exit, timeout).await;
    process.set_exited();
    process.input.release();
    let _ = exited.send(true);
    while pumps.join_next().await.is_some() {}
    table.finish(&process, EndEvent::from(status));
    for (stream, file) in ours {
        // A terminal is hung up with its session; a pipe that children still hold must not break under them.
        if stream != Stream::Pty {
            tokio::spawn(discard(file));
        }
    }
    drop(process);
    tokio::time::sleep(RETENTION).await;
    table.evict();
}

/// The process's status; kills its group when `timeout` passes first, whether or not the client is still there.
async fn exit_status(
    process: &Process,
    mut exit: oneshot::Receiver<ExitStatus>,
    timeout: Option<Duration>,
) -> ExitStatus {
    let lost = ExitStatus::Signaled { signal: libc::SIGKILL, core_dumped: false };
    if let Some(limit) = timeout {
        if let Ok(status) = tokio::time::timeout(limit, &mut exit).await {
            return status.unwrap_or(lost);
        }
        let _ = process.signal_group(Signal::SIGKILL);
    }
    exit.await.unwrap_or(lost)
}

/// Reads one stream until its end, or until the process has exited and everything it had written has been read.
async fn pump(stream: Stream, file: Arc<AsyncFile>, output: Arc<Output>, mut exited: watch::Receiver<bool>) {
    let mut buffer = vec![0; MAX_CHUNK];
    loop {
        let read = tokio::select! {
            read = file.read(&mut buffer) => read,
            _ = exited.changed() => break,
        };
        let Ok(count @ 1..) = read else { return };
        output.append(stream, &buffer[..count]).await;
    }
    let deadline = Instant::now() + ORPHAN_GRACE;
    let mut owed = file.pending();
    loop {
        let read = if owed > 0 {
            file.read(&mut buffer).await
        } else {
            let Ok(read) = tokio::time::timeout_at(deadline, file.read(&mut buffer)).await else { return };
            read
        };
        let Ok(count @ 1..) = read else { return };
        output.append(stream, &buffer[..count]).await;
        owed = owed.saturating_sub(count);
        if owed == 0 && Instant::now() >= deadline {
            return;
        }
    }
}

async fn discard(file: Arc<AsyncFile>) {
    let mut buffer = vec![0; 4096];
    while let Ok(1..) = file.read(&mut buffer).await {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user() -> User {
        let home = std::env::temp_dir();
        User { name: "u".into(), uid: 1, gid: 1, groups: vec![1], home, shell: "/bin/sh".into() }
    }

    #[test]
    fn the_request_wins_over_the_sandbox_over_the_basics() {
        let state = State::new(None, "user", None);
        state.update(|settings| {
            settings.envs = [("A", "sandbox"), ("B", "sandbox"), ("HOME", "/h")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into();
            settings.sandbox_id = Some("id".into());
        });
        let envs = environment(&user(), &state.settings(), &[("A".to_owned(), "request".to_owned())].into());
        let get = |name: &str| envs.get(name).map(String::as_str);
        assert_eq!((get("A"), get("B"), get("HOME")), (Some("request"), Some("sandbox"), Some("/h")));
        assert_eq!((get("PATH"), get("E2B_SANDBOX_ID"), get("E2B_TEMPLATE_ID")), (Some(PATH), Some("id"), None));
    }

    #[test]
    fn a_missing_requested_cwd_is_an_error_and_a_missing_default_is_not() {
        let state = State::new(None, "user", None);
        state.update(|settings| settings.default_workdir = Some("/nonexistent".into()));
        let settings = state.settings();
        let error = working_directory(Some("/no/such"), &user(), &settings).expect_err("missing");
        assert_eq!(error.message, "cwd '/no/such' does not exist");
        let error = working_directory(Some("/proc/self/stat"), &user(), &settings).expect_err("a file");
        assert_eq!(error.message, "cwd '/proc/self/stat' is not a directory");
        assert_eq!(working_directory(None, &user(), &settings), Ok(user().home));
        assert_eq!(working_directory(Some("/"), &user(), &settings), Ok("/".into()));
    }
}
