//! Layers wherever they are: local files, and origins through the block cache.

use std::collections::BTreeMap;
use std::sync::Arc;

use overlaybd::ByteSource;
use serde_json::{json, Value};

use super::Events;
use crate::cache::{Cache, RemoteLayer};
use crate::image::{open_file, LayerSources, LayerSpec};
use crate::origin::{AskingCredentials, Headers};
use crate::{Code, Error};

/// Opens layers, and asks subscribers for new headers when an origin refuses the ones it has.
pub struct Sources {
    cache: Cache,
    credentials: Arc<AskingCredentials>,
}

impl Sources {
    /// Layers of files, and of origins through `cache`.
    pub fn new(cache: Cache, events: Arc<Events>) -> Self {
        let ask = move |url: &str| events.emit(&json!({"event": "credentials", "url": url})) > 0;
        Self { cache, credentials: Arc::new(AskingCredentials::new(ask)) }
    }

    fn remote(&self, url: &str, spec: &LayerSpec) -> Result<RemoteLayer, Error> {
        let size = spec.size.ok_or_else(|| Error::invalid(format!("layer {url} needs its size")))?;
        let digest = match &spec.digest {
            None => None,
            Some(text) => Some(RemoteLayer::parse_digest(text).ok_or_else(|| {
                Error::invalid(format!("layer {url}: digest {text:?} is not sha256: and 64 hexadecimal digits"))
            })?),
        };
        Ok(RemoteLayer {
            headers: headers(&spec.headers)?,
            digest,
            path: spec.path.clone(),
            credentials: self.credentials.clone(),
            ..RemoteLayer::new(url, size)
        })
    }
}

fn headers(pairs: &BTreeMap<String, String>) -> Result<Headers, Error> {
    Headers::new(pairs).map_err(|e| Error::caused(Code::Invalid, "headers", &e))
}

impl LayerSources for Sources {
    fn open(&self, spec: &LayerSpec) -> Result<Arc<dyn ByteSource>, Error> {
        match (&spec.url, &spec.path) {
            (None, Some(path)) => open_file(path),
            (None, None) => Err(Error::invalid("a layer needs a path or a url")),
            (Some(url), _) => {
                let layer = self.cache.open_layer(self.remote(url, spec)?);
                let layer = layer.map_err(|e| Error::caused(Code::Origin, format_args!("opening layer {url}"), &e))?;
                self.cache.complete_later(&layer);
                Ok(Arc::new(layer))
            }
        }
    }

    fn cache_stat(&self) -> Result<Value, Error> {
        serde_json::to_value(self.cache.stats())
            .map_err(|e| Error::caused(Code::Io, "reading the cache's counters", &e))
    }

    fn credentials(&self, url: &str, pairs: &BTreeMap<String, String>) -> Result<usize, Error> {
        let headers = headers(pairs)?;
        self.credentials.supply(url, &headers);
        Ok(self.cache.set_headers(url, &headers))
    }
}
