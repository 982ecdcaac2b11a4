//! The `envd` binary: init and daemon in a guest, an ordinary process with `--port` and `--host` anywhere else.

use std::convert::Infallible;
use std::net::TcpListener;
use std::process::ExitCode;
use std::sync::Arc;

use envd::{init, log, memory, server, state::State};
use tokio::net::UdpSocket;
use tokio::task::JoinSet;

const USAGE: &str = "usage: envd [--host ADDRESS] [--port PORT] [--user NAME] | --version";

/// Threads for blocking file work. Enough that some calls stuck on a dead mount, or large moves and removals, do not keep the
/// others waiting; each costs memory only while it is used.
const BLOCKING_THREADS: usize = 64;

struct Options {
    host: String,
    port: u16,
    user: String,
}

impl Options {
    /// `None` when the arguments make no sense.
    fn parse(mut args: impl Iterator<Item = String>) -> Option<Self> {
        let mut options = Self { host: "127.0.0.1".into(), port: 49983, user: "user".into() };
        while let Some(flag) = args.next() {
            let value = args.next()?;
            match flag.as_str() {
                "--host" => options.host = value,
                "--port" => options.port = value.parse().ok()?,
                "--user" => options.user = value,
                _ => return None,
            }
        }
        Some(options)
    }
}

fn main() -> ExitCode {
    memory::configure();
    if std::process::id() == 1 {
        // The kernel passes parameters it does not know as arguments; they are not for us.
        init::run(serve);
    }
    let mut args = std::env::args().skip(1).peekable();
    if args.peek().is_some_and(|arg| arg == "--version") {
        println!("{}", envd::VERSION);
        return ExitCode::SUCCESS;
    }
    let Some(options) = Options::parse(args) else {
        log!("{USAGE}");
        return ExitCode::from(2);
    };
    // Orphans of our processes come to us, as they do in a guest; without it they go to the host's init.
    let _ = nix::sys::prctl::set_child_subreaper(true);
    let state = Arc::new(State::new(None, &options.user, init::limits::raise_own()));
    match serve(&options.host, options.port, state) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log!("cannot serve on {}:{}: {error}", options.host, options.port);
            ExitCode::FAILURE
        }
    }
}

/// In a guest, keeps what its programs write to the files we hold in memory.
async fn keep_edits(state: Arc<State>) -> Infallible {
    if let Some(machine) = &state.machine {
        let Err(error) = machine.names.keep_edits().await;
        log!("edits of /etc/hosts are not kept: {error}");
    }
    std::future::pending().await
}

/// Serves until SIGTERM or SIGINT.
fn serve(host: &str, port: u16, state: Arc<State>) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_stack_size(256 << 10)
        .build()?;
    let outcome = runtime.block_on(async {
        use tokio::signal::unix::{signal, SignalKind};
        let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let listener = TcpListener::bind((host, port))?;
        listener.set_nonblocking(true)?;
        let calls = UdpSocket::bind((host, port)).await?;
        log!("version {} serves {}", envd::VERSION, listener.local_addr()?);
        // Each a task of its own: what wakes one does not have to go through the others.
        let mut tasks = JoinSet::new();
        let (reaper, guest) = (state.processes.reaper.clone(), state.clone());
        tasks.spawn(async { reaper.run().await.map(|never| match never {}) });
        tasks.spawn(async { match keep_edits(guest).await {} });
        let guest = state.clone();
        tasks.spawn(async { server::hold::serve(calls, guest).await.map(|never| match never {}) });
        tasks.spawn(async { server::serve(listener, state).await.map(|never| match never {}) });
        tasks.spawn(async move { terminate.recv().await.map_or(Ok(()), Ok) });
        tasks.spawn(async move { interrupt.recv().await.map_or(Ok(()), Ok) });
        match tasks.join_next().await {
            Some(Err(panic)) => Err(panic.into()),
            Some(Ok(outcome)) => outcome,
            None => Ok(()),
        }
    });
    // Blocking work that hangs (a dead mount) must not hold up the end.
    runtime.shutdown_background();
    outcome
}
