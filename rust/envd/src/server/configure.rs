//! `POST /init`: what the host tells a sandbox at creation and after every resume and fork.

use std::collections::BTreeMap;
use std::io;

use base64::engine::general_purpose::STANDARD;
use base64::Engine;
use hyper::StatusCode;
use serde::{Deserialize, Deserializer};

use crate::error::HttpError;
use crate::http::{empty, read_body, Request, Response, Survivor};
use crate::log;
use crate::machine::mailbox::Mailbox;
use crate::machine::{certificates, clock, names, Machine, GENERATION};
use crate::state::State;

/// Longest body; a CA bundle is the largest part.
const MAX_BODY: usize = 4 << 20;

/// Absent fields change nothing. `hyperloopIP`, `volumeMounts` and `lifecycleID` are E2B's and have no meaning here.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Configuration {
    /// Added to the sandbox's variables; a newer value wins.
    env_vars: Option<BTreeMap<String, String>>,
    /// Empty or null opens the sandbox; only absence keeps the token.
    #[serde(deserialize_with = "present")]
    access_token: Option<String>,
    /// The host's time, RFC 3339.
    timestamp: Option<String>,
    /// The generation that the time was said to: one that was on its way when the guest was captured is old news to its copies.
    to_generation: Option<String>,
    default_user: Option<String>,
    /// Empty means the user's home.
    default_workdir: Option<String>,
    /// Certificates in PEM.
    ca_bundle: Option<String>,
    hostname: Option<String>,
    generation: Option<String>,
    /// Base64.
    entropy: Option<String>,
    #[serde(rename = "sandboxID")]
    sandbox_id: Option<String>,
    #[serde(rename = "templateID")]
    template_id: Option<String>,
}

/// A field that was sent: null is the same as empty.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    Option::deserialize(deserializer).map(|text: Option<String>| Some(text.unwrap_or_default()))
}

/// Applies the request's configuration; 204 when all of it is in force.
///
/// # Errors
/// Those of [`apply`], and of reading the body.
pub async fn handle(request: Request, state: &State) -> Result<Response, HttpError> {
    let survivor = request.extensions().get::<Survivor>().cloned().unwrap_or_default();
    let body = read_body(request.into_body(), MAX_BODY).await?;
    let rest = apply(&body, state, None)?;
    if rest.other_guest {
        survivor.mark();
    }
    rest.apply(state);
    Ok(empty(StatusCode::NO_CONTENT))
}

/// Applies of a configuration what can fail; the rest has to follow before another request is looked at. With `mailbox` the time
/// is read there instead, at the moment it is needed.
///
/// # Errors
/// 400 for a malformed body, before anything is changed; 500 when the machine refuses a change.
pub fn apply(body: &[u8], state: &State, mailbox: Option<&Mailbox>) -> Result<Rest, HttpError> {
    let bad = |message: String| HttpError::new(StatusCode::BAD_REQUEST, message);
    let mut configuration: Configuration = match body {
        [] => Configuration::default(),
        body => serde_json::from_slice(body).map_err(|error| bad(format!("cannot decode the body: {error}")))?,
    };
    let mut change = MachineChange::parse(&configuration).map_err(bad)?;
    if let Some(machine) = &state.machine {
        let repeated = state.with_settings(|settings| {
            settings.generation.is_some() && [&None, &settings.generation].contains(&&configuration.generation)
        });
        let meant_for_us = state.with_settings(|settings| {
            configuration.to_generation.is_none() || configuration.to_generation == settings.generation
        });
        if !meant_for_us {
            change.unix_ns = None;
        }
        change
            .apply(machine, mailbox, repeated)
            .map_err(|message| HttpError::new(StatusCode::INTERNAL_SERVER_ERROR, message))?;
    }
    let ports = change.ports;
    let non_empty = |text: &String| !text.is_empty();
    Ok(Rest {
        ports,
        hostname: configuration.hostname.take().filter(non_empty),
        ca_bundle: configuration.ca_bundle.take().filter(non_empty),
        other_guest: apply_settings(configuration, state),
    })
}

/// What of a configuration is not worth a failure: names and certificates are files the guest may have made unwritable, which
/// is its own loss. Nor is it worth the wait: the host may go on meanwhile.
#[must_use]
#[derive(Debug)]
pub struct Rest {
    ports: Option<u16>,
    hostname: Option<String>,
    ca_bundle: Option<String>,
    /// Whether connections lead to a host that no longer knows them.
    other_guest: bool,
}

impl Rest {
    /// Applies it.
    pub fn apply(self, state: &State) {
        let report = |what: &str, outcome: io::Result<()>| {
            if let Err(error) = outcome {
                log!("cannot {what}: {error}");
            }
        };
        if let Some(machine) = &state.machine {
            if let Some(choice) = self.ports {
                report("set the range of local ports", machine.ports.shift(choice));
            }
            if let Some(name) = &self.hostname {
                report("set the hostname", machine.names.set_hostname(name));
            }
            if let Some(pem) = &self.ca_bundle {
                report("install the CA bundle", certificates::install(pem));
            }
        }
        if self.other_guest {
            state.epoch.send_modify(|epoch| *epoch += 1);
        }
    }
}

/// Names a guest that has just booted, in the way of every later launch: the memory and the pages of files that takes are in
/// snapshots of this guest then, and none of its successors has to get them.
pub fn rehearse(state: &State, hostname: &str) {
    // As long as the host's own.
    let generation = "0".repeat(32);
    let body = format!(
        r#"{{"hostname":"{hostname}","generation":"{generation}","envVars":{{}},"defaultUser":"","defaultWorkdir":""}}"#
    );
    match apply(body.as_bytes(), state, None) {
        Ok(rest) => rest.apply(state),
        Err(error) => log!("{error}"),
    }
    state.update(|settings| settings.generation = None);
}

/// Returns whether the guest has become another one.
fn apply_settings(configuration: Configuration, state: &State) -> bool {
    let non_empty = |text: String| (!text.is_empty()).then_some(text);
    let mut other = false;
    state.update(|settings| {
        settings.envs.extend(configuration.env_vars.unwrap_or_default());
        if let Some(token) = configuration.access_token {
            settings.access_token = non_empty(token);
        }
        if let Some(user) = configuration.default_user.and_then(non_empty) {
            settings.default_user = user;
        }
        if let Some(workdir) = configuration.default_workdir {
            settings.default_workdir = non_empty(workdir);
        }
        settings.sandbox_id = configuration.sandbox_id.or(settings.sandbox_id.take());
        settings.template_id = configuration.template_id.or(settings.template_id.take());
        if configuration.generation.is_some() {
            other = settings.generation.is_some() && settings.generation != configuration.generation;
            settings.generation = configuration.generation;
        }
    });
    other
}

/// The checked part of a configuration that concerns the whole machine and has to succeed: what clones must not share.
struct MachineChange<'a> {
    unix_ns: Option<i128>,
    entropy: Option<Vec<u8>>,
    ports: Option<u16>,
    generation: Option<&'a str>,
}

impl<'a> MachineChange<'a> {
    fn parse(configuration: &'a Configuration) -> Result<Self, String> {
        let unix_ns = match &configuration.timestamp {
            None => None,
            Some(text) => {
                let parsed = clock::parse_rfc3339(text);
                Some(parsed.ok_or_else(|| format!("timestamp '{text}' is not an RFC 3339 time"))?)
            }
        };
        let mut entropy = match &configuration.entropy {
            None => None,
            Some(text) => Some(STANDARD.decode(text).map_err(|error| format!("entropy is not base64: {error}"))?),
        };
        let hostname = configuration.hostname.as_deref().filter(|name| !name.is_empty());
        if let Some(name) = hostname.filter(|name| !names::is_hostname(name)) {
            return Err(format!("hostname '{name}' is not one: use letters, digits and '-', at most 64"));
        }
        // Two of the bytes choose the ports, which others see; the rest stays between the host and the kernel.
        let ports = entropy.as_mut().filter(|bytes| bytes.len() > 2).map(|bytes| {
            let last = bytes.split_off(bytes.len() - 2);
            u16::from_le_bytes([last[0], last[1]])
        });
        Ok(Self { unix_ns, entropy, ports, generation: configuration.generation.as_deref() })
    }

    /// The clock first, because it goes stale while we work.
    fn apply(&self, machine: &Machine, mailbox: Option<&Mailbox>, repeated: bool) -> Result<(), String> {
        if let Some(unix_ns) = mailbox.map(Mailbox::unix_ns).or(self.unix_ns) {
            clock::step_to(unix_ns, repeated).map_err(|error| format!("cannot set the clock: {error}"))?;
        }
        if let Some(bytes) = &self.entropy {
            machine.entropy.reseed(bytes).map_err(|error| format!("cannot reseed the random generator: {error}"))?;
        }
        if let Some(generation) = self.generation {
            machine.set_generation(generation).map_err(|error| format!("cannot write {GENERATION}: {error}"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Configuration {
        serde_json::from_str(json).expect("valid")
    }

    #[test]
    fn settings_are_merged_and_absent_fields_stay() {
        let state = State::new(None, "user", None);
        apply_settings(
            parse(r#"{"envVars":{"A":"1","B":"1"},"accessToken":"t","defaultWorkdir":"/w","sandboxID":"i1","x":1}"#),
            &state,
        );
        apply_settings(parse(r#"{"envVars":{"B":"2"},"defaultUser":"root","defaultWorkdir":""}"#), &state);
        let settings = state.settings();
        assert_eq!(settings.envs, [("A".into(), "1".into()), ("B".into(), "2".into())].into());
        assert_eq!((settings.access_token.as_deref(), settings.sandbox_id.as_deref()), (Some("t"), Some("i1")));
        assert_eq!((settings.default_user.as_str(), settings.default_workdir), ("root", None));
        for open in [r#"{"accessToken":""}"#, r#"{"accessToken":null}"#] {
            state.update(|settings| settings.access_token = Some("t".into()));
            apply_settings(parse(open), &state);
            assert_eq!(state.settings().access_token, None, "{open}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for json in [r#"{"timestamp":"soon"}"#, r#"{"entropy":"***"}"#, r#"{"hostname":"a b"}"#] {
            assert!(MachineChange::parse(&parse(json)).is_err(), "{json}");
        }
    }
}
