//! What the host has told this sandbox about itself, shared by every handler.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLock};

use hyper::header::HeaderMap;
use tokio::sync::watch;

use crate::auth::is_token;
use crate::error::RpcError;
use crate::filesystem::watch::registry::Registry;
use crate::machine::Machine;
use crate::process::spawn::FileLimit;
use crate::process::table::Table;
use crate::reaper::Reaper;
use crate::server::metrics::Meter;
use crate::users::{requested_user, User, UserDb};

/// The settings `POST /init` changes. A snapshot of them is cheap to clone.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Callers must present it; `None` leaves the sandbox open.
    pub access_token: Option<String>,
    /// Environment of every process started from now on.
    pub envs: BTreeMap<String, String>,
    /// User of requests that name none.
    pub default_user: String,
    /// Directory of relative paths and processes without a cwd; the user's home when `None`.
    pub default_workdir: Option<String>,
    /// `E2B_SANDBOX_ID` of processes.
    pub sandbox_id: Option<String>,
    /// `E2B_TEMPLATE_ID` of processes.
    pub template_id: Option<String>,
    /// Changes at every resume and fork; also in /run/aenv/generation.
    pub generation: Option<String>,
}

/// Shared state of the daemon.
#[derive(Debug)]
pub struct State {
    /// The guest whose PID 1 this process is. Outside a guest the clock, the hostname and other machine-wide things are left
    /// alone.
    pub machine: Option<Machine>,
    /// The processes clients have started.
    pub processes: Arc<Table>,
    /// What `/metrics` measures with.
    pub meter: Meter,
    /// The watchers of clients that poll.
    pub watchers: Registry,
    /// Ticks when this guest has become another one: connections from before lead to a host that no longer knows them.
    pub epoch: watch::Sender<u64>,
    settings: RwLock<Settings>,
}

impl State {
    /// State before the first `/init`. `default_user` must exist in the guest for requests without a user to succeed; `files` is
    /// the limit of open files that processes get.
    pub fn new(machine: Option<Machine>, default_user: &str, files: FileLimit) -> Self {
        let settings = Settings {
            access_token: None,
            envs: BTreeMap::new(),
            default_user: default_user.to_owned(),
            default_workdir: None,
            sandbox_id: None,
            template_id: None,
            generation: None,
        };
        let processes = Arc::new(Table::new(Arc::new(Reaper::default()), files));
        Self {
            machine,
            processes,
            meter: Meter::default(),
            watchers: Registry::default(),
            epoch: watch::Sender::new(0),
            settings: RwLock::new(settings),
        }
    }

    /// Whether a peer is the host. Outside a guest there is nobody to keep out.
    pub fn is_host(&self, peer: IpAddr) -> bool {
        self.machine.as_ref().is_none_or(|machine| peer == machine.host)
    }

    /// Whether a caller that presents `token` may give orders.
    pub fn admits(&self, token: Option<&[u8]>) -> bool {
        self.with_settings(|settings| settings.access_token.as_ref().is_none_or(|expected| is_token(expected, token)))
    }

    /// Looks at the settings as they are now.
    pub fn with_settings<T>(&self, look: impl FnOnce(&Settings) -> T) -> T {
        look(&self.settings.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// A copy of the settings as they are now.
    pub fn settings(&self) -> Settings {
        self.with_settings(Settings::clone)
    }

    /// Changes the settings in one step.
    pub fn update(&self, change: impl FnOnce(&mut Settings)) {
        change(&mut self.settings.write().unwrap_or_else(PoisonError::into_inner));
    }

    /// The user a request acts as: the one of its Authorization header, else the default user.
    ///
    /// # Errors
    /// `unauthenticated` when there is no such user.
    pub fn effective_user(&self, headers: &HeaderMap) -> Result<User, RpcError> {
        self.user_or_default(requested_user(headers)?.as_deref())
    }

    /// The user called `name`, or the default user when `None` or empty.
    ///
    /// # Errors
    /// `unauthenticated` when there is no such user.
    pub fn user_or_default(&self, name: Option<&str>) -> Result<User, RpcError> {
        let db = UserDb::load();
        match name.filter(|name| !name.is_empty()) {
            Some(name) => db.user(name),
            None => db.user(&self.settings().default_user),
        }
    }
}
