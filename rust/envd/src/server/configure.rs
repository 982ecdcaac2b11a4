//! `POST /init`: what the host tells a sandbox at creation and after every resume and fork.

use std::collections::BTreeMap;
use std::path::Path;

use base64::engine::general_purpose::STANDARD;
use base64::Engine;
use hyper::StatusCode;
use serde::{Deserialize, Deserializer};

use crate::error::HttpError;
use crate::http::{empty, read_body, Request, Response, Survivor};
use crate::log;
use crate::machine::{certificates, clock, entropy, names, replace_file};
use crate::state::State;

/// Longest body; a CA bundle is the largest part.
const MAX_BODY: usize = 4 << 20;

/// Where programs in the guest can see that they are a new copy.
const GENERATION: &str = "/run/aenv/generation";

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
/// 400 for a malformed body, before anything is changed; 500 when the machine refuses a change.
pub async fn handle(request: Request, state: &State) -> Result<Response, HttpError> {
    let survivor = request.extensions().get::<Survivor>().cloned().unwrap_or_default();
    let body = read_body(request.into_body(), MAX_BODY).await?;
    let bad = |message: String| HttpError::new(StatusCode::BAD_REQUEST, message);
    let configuration: Configuration = match &body[..] {
        [] => Configuration::default(),
        body => serde_json::from_slice(body).map_err(|error| bad(format!("cannot decode the body: {error}")))?,
    };
    let change = MachineChange::parse(&configuration).map_err(bad)?;
    if state.is_init {
        change.apply().map_err(|message| HttpError::new(StatusCode::INTERNAL_SERVER_ERROR, message))?;
    }
    let before = state.settings().generation;
    apply_settings(configuration, state);
    if before.is_some() && before != state.settings().generation {
        survivor.mark();
        state.epoch.send_modify(|epoch| *epoch += 1);
    }
    Ok(empty(StatusCode::NO_CONTENT))
}

fn apply_settings(configuration: Configuration, state: &State) {
    let non_empty = |text: String| (!text.is_empty()).then_some(text);
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
        settings.generation = configuration.generation.or(settings.generation.take());
    });
}

/// The checked part of a configuration that concerns the whole machine.
struct MachineChange<'a> {
    unix_ns: Option<i128>,
    entropy: Option<Vec<u8>>,
    hostname: Option<&'a str>,
    generation: Option<&'a str>,
    ca_bundle: Option<&'a str>,
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
        let entropy = match &configuration.entropy {
            None => None,
            Some(text) => Some(STANDARD.decode(text).map_err(|error| format!("entropy is not base64: {error}"))?),
        };
        let hostname = configuration.hostname.as_deref().filter(|name| !name.is_empty());
        if let Some(name) = hostname.filter(|name| !names::is_hostname(name)) {
            return Err(format!("hostname '{name}' is not one: use letters, digits and '-', at most 64"));
        }
        let ca_bundle = configuration.ca_bundle.as_deref().filter(|pem| !pem.is_empty());
        Ok(Self { unix_ns, entropy, hostname, generation: configuration.generation.as_deref(), ca_bundle })
    }

    /// The clock first, because it goes stale while we work. What a clone must not share (clock, randomness, generation) has to
    /// succeed; names and certificates are files the guest may have made unwritable, which is its own loss.
    fn apply(&self) -> Result<(), String> {
        if let Some(unix_ns) = self.unix_ns {
            let step = clock::step_to(unix_ns).map_err(|error| format!("cannot set the clock: {error}"))?;
            if let Some(step) = step {
                log!("clock stepped by {} ms", step / 1_000_000);
            }
        }
        if let Some(bytes) = &self.entropy {
            entropy::reseed(bytes).map_err(|error| format!("cannot reseed the random generator: {error}"))?;
        }
        if let Some(generation) = self.generation {
            replace_file(Path::new(GENERATION), generation.as_bytes())
                .map_err(|error| format!("cannot write {GENERATION}: {error}"))?;
        }
        if let Some(Err(error)) = self.hostname.map(names::set_hostname) {
            log!("cannot set the hostname: {error}");
        }
        if let Some(Err(error)) = self.ca_bundle.map(certificates::install) {
            log!("cannot install the CA bundle: {error}");
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
        let state = State::new(false, "user", None);
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
