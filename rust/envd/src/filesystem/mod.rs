//! `filesystem.Filesystem` RPCs: every operation runs on a blocking thread with the permissions of the effective user.

pub mod credentials;
pub mod entry;
pub mod error;
pub mod links;
pub mod list;
pub mod metadata;
pub mod place;
pub mod remove;
pub mod time;
pub mod watch;
mod wire;

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::value::RawValue;

use self::credentials::run_as;
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

/// Whose permissions a call has, and where its relative paths start.
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
    let actor = Actor::of(&call, &state)?;
    let path = actor.path(&input.path)?;
    let entry = run_as(&actor.user, move || entry::stat(&path, &UserDb::load())).await?;
    Ok(EntryResponse { entry })
}

async fn list_dir(state: Arc<State>, call: Call, input: ListDirRequest) -> Result<ListDirResponse, RpcError> {
    let actor = Actor::of(&call, &state)?;
    let path = actor.path(&input.path)?;
    let entries = run_as(&actor.user, move || {
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
    let entry = run_as(&actor.user, move || {
        place::make_dir(&path)?;
        entry::stat(&path, &UserDb::load())
    });
    Ok(EntryResponse { entry: entry.await? })
}

async fn rename(state: Arc<State>, call: Call, input: MoveRequest) -> Result<EntryResponse, RpcError> {
    let actor = Actor::of(&call, &state)?;
    let (source, destination) = (actor.path(&input.source)?, actor.path(&input.destination)?);
    let entry = run_as(&actor.user, move || {
        place::rename(&source, &destination)?;
        entry::stat(&destination, &UserDb::load())
    });
    Ok(EntryResponse { entry: entry.await? })
}

async fn remove(state: Arc<State>, call: Call, input: PathRequest) -> Result<Empty, RpcError> {
    let actor = Actor::of(&call, &state)?;
    let path = actor.path(&input.path)?;
    run_as(&actor.user, move || remove::remove(&path)).await?;
    Ok(Empty {})
}

async fn watch_dir(state: Arc<State>, call: Call, input: WatchRequest, sink: Arc<EventSink>) -> Result<(), RpcError> {
    let actor = Actor::of(&call, &state)?;
    let path = actor.path(&input.path)?;
    let mut watch = Watch::start(actor.user, path, &input).await?;
    let mut connected = sink.send(&WatchDirResponse::Start {}).await;
    while connected {
        for event in watch.next().await? {
            connected = sink.send(&WatchDirResponse::Filesystem(&event)).await;
        }
    }
    Ok(())
}

async fn create_watcher(state: Arc<State>, call: Call, input: WatchRequest) -> Result<CreateWatcherResponse, RpcError> {
    let actor = Actor::of(&call, &state)?;
    let path = actor.path(&input.path)?;
    let watch = Watch::start(actor.user, path, &input).await?;
    Ok(CreateWatcherResponse { watcher_id: state.watchers.add(watch)? })
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
            // Connect has no code for a full disk; `resource_exhausted` would make the SDKs call it a rate limit.
            FsErrorKind::FailedPrecondition | FsErrorKind::NoSpace => Code::FailedPrecondition,
            FsErrorKind::PermissionDenied => Code::PermissionDenied,
            FsErrorKind::ResourceExhausted => Code::ResourceExhausted,
            FsErrorKind::Internal => Code::Internal,
        };
        Self { code, message: error.message }
    }
}
