//! `filesystem.Filesystem` RPCs.
//!
//! As in E2B, envd does this work as root, whoever the effective user is: that user decides what `~` and relative paths mean
//! and owns what the work brings into being. It is no boundary, because every caller may name root.

pub mod entry;
pub mod error;
pub mod list;
pub mod metadata;
pub mod place;
pub mod remove;
pub mod time;
mod transfer;
pub mod watch;
mod wire;

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::value::RawValue;

use self::entry::EntryInfo;
use self::error::{FsError, FsErrorKind};
use self::watch::wire::{CreateWatcherResponse, WatchDirResponse, WatchRequest, WatcherEventsResponse, WatcherRequest};
use self::watch::Watch;
use self::wire::{Empty, EntryResponse, ListDirRequest, ListDirResponse, MoveRequest, PathRequest};
use crate::connect::{server_stream, unary, Call, EventSink, MAX_MESSAGE};
use crate::error::{Code, RpcError};
use crate::http::{Request, Response};
use crate::paths::resolve;
use crate::state::State;
use crate::users::{User, UserDb};

/// Answers `POST /filesystem.Filesystem/<method>`. The access token has been checked.
pub async fn dispatch(method: &str, request: Request, state: Arc<State>) -> Response {
    match method {
        "Stat" => unary(request, |call, input| stat(state, call, input)).await,
        "ListDir" => unary(request, |call, input| list_dir(state, call, input)).await,
        "MakeDir" => unary(request, |call, input| make_dir(state, call, input)).await,
        "Move" => unary(request, |call, input| rename(state, call, input)).await,
        "Remove" => unary(request, |call, input| remove(state, call, input)).await,
        "WatchDir" => {
            server_stream(request, WatchDirResponse::Keepalive {}, |call, input, sink| {
                watch_dir(state, call, input, sink)
            })
            .await
        }
        "CreateWatcher" => unary(request, |call, input| create_watcher(state, call, input)).await,
        "GetWatcherEvents" => {
            unary(request, |_, input: WatcherRequest| async move {
                Ok(WatcherEventsResponse { events: state.watchers.events(&input.watcher_id)? })
            })
            .await
        }
        "RemoveWatcher" => {
            unary(request, |_, input: WatcherRequest| async move {
                state.watchers.remove(&input.watcher_id)?;
                Ok(Empty {})
            })
            .await
        }
        _ => RpcError::unimplemented(format!("filesystem.Filesystem/{method} does not exist")).into_response(),
    }
}

/// Who will own what a call makes, and where its relative paths start.
struct Actor {
    user: User,
    workdir: Option<String>,
}

impl Actor {
    fn of(call: &Call, state: &State) -> Result<Self, RpcError> {
        Ok(Self { user: state.effective_user(&call.headers)?, workdir: state.settings().default_workdir })
    }

    fn path(&self, path: &str) -> Result<PathBuf, RpcError> {
        resolve(path, &self.user, self.workdir.as_deref())
    }
}

async fn stat(state: Arc<State>, call: Call, input: PathRequest) -> Result<EntryResponse, RpcError> {
    let path = Actor::of(&call, &state)?.path(&input.path)?;
    let entry = blocking(move || entry::stat(&path, &UserDb::load())).await?;
    Ok(EntryResponse { entry })
}

async fn list_dir(state: Arc<State>, call: Call, input: ListDirRequest) -> Result<ListDirResponse, RpcError> {
    let path = Actor::of(&call, &state)?.path(&input.path)?;
    let entries = blocking(move || {
        let mut text = String::from("[");
        list::list(&path, input.depth, &UserDb::load(), |entry| append(&mut text, entry))?;
        text.push(']');
        RawValue::from_string(text).map_err(internal)
    });
    Ok(ListDirResponse { entries: entries.await? })
}

async fn make_dir(state: Arc<State>, call: Call, input: PathRequest) -> Result<EntryResponse, RpcError> {
    let actor = Actor::of(&call, &state)?;
    let path = actor.path(&input.path)?;
    let entry = blocking(move || {
        place::make_dir(&path, &actor.user)?;
        entry::stat(&path, &UserDb::load())
    });
    Ok(EntryResponse { entry: entry.await? })
}

async fn rename(state: Arc<State>, call: Call, input: MoveRequest) -> Result<EntryResponse, RpcError> {
    let actor = Actor::of(&call, &state)?;
    let (source, destination) = (actor.path(&input.source)?, actor.path(&input.destination)?);
    let entry = blocking(move || {
        place::rename(&source, &destination, &actor.user)?;
        entry::stat(&destination, &UserDb::load())
    });
    Ok(EntryResponse { entry: entry.await? })
}

async fn remove(state: Arc<State>, call: Call, input: PathRequest) -> Result<Empty, RpcError> {
    let path = Actor::of(&call, &state)?.path(&input.path)?;
    blocking(move || remove::remove(&path)).await?;
    Ok(Empty {})
}

async fn watch_dir(state: Arc<State>, call: Call, input: WatchRequest, sink: Arc<EventSink>) -> Result<(), RpcError> {
    let path = Actor::of(&call, &state)?.path(&input.path)?;
    let mut watch = Watch::start(path, &input).await?;
    let mut connected = sink.send(&WatchDirResponse::Start {}).await;
    while connected {
        for event in watch.next().await? {
            connected = sink.send(&WatchDirResponse::Filesystem(&event)).await;
        }
    }
    Ok(())
}

async fn create_watcher(state: Arc<State>, call: Call, input: WatchRequest) -> Result<CreateWatcherResponse, RpcError> {
    let path = Actor::of(&call, &state)?.path(&input.path)?;
    let watch = Watch::start(path, &input).await?;
    Ok(CreateWatcherResponse { watcher_id: state.watchers.add(watch)? })
}

/// Runs file work on a thread of the blocking pool.
///
/// # Errors
/// What `work` returns; `internal` when the pool is shutting down.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, FsError> + Send + 'static,
) -> Result<T, FsError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(FsError::new(FsErrorKind::Internal, format!("file-system worker failed: {error}"))),
    }
}

fn append(text: &mut String, entry: &EntryInfo) -> Result<(), FsError> {
    if text.len() > MAX_MESSAGE {
        let message = format!("the listing is longer than {MAX_MESSAGE} bytes; ask for less depth or a subdirectory");
        return Err(FsError::new(FsErrorKind::ResourceExhausted, message));
    }
    if text.len() > 1 {
        text.push(',');
    }
    text.push_str(&serde_json::to_string(entry).map_err(internal)?);
    Ok(())
}

fn internal(error: serde_json::Error) -> FsError {
    FsError::new(FsErrorKind::Internal, format!("cannot encode an entry: {error}"))
}

impl From<FsError> for RpcError {
    fn from(error: FsError) -> Self {
        let code = match error.kind {
            FsErrorKind::NotFound => Code::NotFound,
            FsErrorKind::AlreadyExists => Code::AlreadyExists,
            FsErrorKind::InvalidArgument => Code::InvalidArgument,
            FsErrorKind::FailedPrecondition => Code::FailedPrecondition,
            FsErrorKind::PermissionDenied => Code::PermissionDenied,
            FsErrorKind::ResourceExhausted => Code::ResourceExhausted,
            // A full disk is `internal`, as upstream has it: `resource_exhausted` becomes the SDKs' rate-limit error, which
            // invites clients to try again. (In /files it is 507, for which they have an error of its own.)
            FsErrorKind::NoSpace | FsErrorKind::Internal => Code::Internal,
        };
        Self { code, message: error.message }
    }
}
