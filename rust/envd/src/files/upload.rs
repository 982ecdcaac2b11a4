//! `POST /files`.

use std::path::{Path, PathBuf};

use bytes::BytesMut;
use hyper::header::{HeaderMap, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use hyper::StatusCode;
use serde::Serialize;

use super::body::{BodyReader, Pieces};
use super::multipart::{Multipart, Part};
use super::sink::{Destination, Sink, BATCH};
use super::Query;
use crate::error::{json_response, HttpError};
use crate::filesystem::metadata::{self, UserMetadata};
use crate::http::{RequestBody, Response};
use crate::paths::resolve;
use crate::state::State;
use crate::users::User;

/// One file of the answer. `metadata` must be absent when there are none: clients compare the object as a whole.
#[derive(Debug, Serialize)]
struct Written {
    path: String,
    name: String,
    r#type: &'static str,
    #[serde(skip_serializing_if = "UserMetadata::is_empty")]
    metadata: UserMetadata,
}

/// Stores the body, `application/octet-stream` or `multipart/form-data`, and answers with what was written. Files of a multipart
/// body that were complete before an error stay; see [`super::sink`] for the one that was not.
///
/// # Errors
/// 400, 401, 404, 408, 507, as the protocol says (§3.5).
pub async fn upload(
    headers: &HeaderMap,
    body: &mut BodyReader<RequestBody>,
    state: &State,
    query: Query,
    user: User,
) -> Result<Response, HttpError> {
    let plan = Plan::new(headers, state, query, user)?;
    let written = match &plan.multipart {
        None => plan.octet_stream(body).await?,
        Some(content_type) => plan.form(Multipart::new(content_type, body)?).await?,
    };
    Ok(json_response(StatusCode::OK, &written))
}

/// What the head of the request says.
struct Plan {
    user: User,
    workdir: Option<String>,
    /// As sent; `None` leaves it to the file names of the parts.
    path: Option<String>,
    metadata: UserMetadata,
    /// The whole content type, if it is multipart.
    multipart: Option<String>,
    gzip: bool,
    length: Option<u64>,
}

impl Plan {
    fn new(headers: &HeaderMap, state: &State, query: Query, user: User) -> Result<Self, HttpError> {
        let text = |name| headers.get(name).and_then(|value: &hyper::header::HeaderValue| value.to_str().ok());
        let content_type = text(CONTENT_TYPE).unwrap_or("");
        let multipart = match content_type.split(';').next().unwrap_or("").trim().to_ascii_lowercase().as_str() {
            "multipart/form-data" => Some(content_type.to_owned()),
            "application/octet-stream" => None,
            other => {
                let known = "send 'application/octet-stream' or 'multipart/form-data'";
                return Err(bad(format!("content type '{other}' is not supported, {known}")));
            }
        };
        let gzip = match text(CONTENT_ENCODING).unwrap_or("").trim().to_ascii_lowercase().as_str() {
            "" | "identity" => false,
            "gzip" | "x-gzip" if multipart.is_none() => true,
            other => {
                let known = "application/octet-stream may be sent with 'gzip', everything else without";
                return Err(bad(format!("content encoding '{other}' is not supported: {known}")));
            }
        };
        let length = text(CONTENT_LENGTH).and_then(|length| length.parse().ok());
        Ok(Self {
            user,
            workdir: state.settings().default_workdir,
            path: query.path.filter(|path| !path.is_empty()),
            metadata: metadata::from_headers(headers)?,
            length: length.filter(|_| multipart.is_none() && !gzip),
            multipart,
            gzip,
        })
    }

    async fn octet_stream(&self, body: &mut BodyReader<RequestBody>) -> Result<Vec<Written>, HttpError> {
        let path = self.path.as_deref().ok_or_else(|| bad("query parameter 'path' is missing"))?;
        let destination = self.destination(path)?;
        let written = self.written(&destination.path);
        store(destination, body).await?;
        Ok(vec![written])
    }

    async fn form(&self, mut form: Multipart<'_, RequestBody>) -> Result<Vec<Written>, HttpError> {
        let mut all: Vec<Written> = Vec::new();
        while let Some(part) = form.next_part().await? {
            let Some(path) = self.path_of(&part)? else { continue };
            let destination = self.destination(&path)?;
            let written = self.written(&destination.path);
            if all.iter().any(|earlier| earlier.path == written.path) {
                return Err(bad(format!("'{}' is the destination of two parts; upload one file there", written.path)));
            }
            store(destination, &mut form).await?;
            all.push(written);
        }
        if all.is_empty() {
            return Err(bad("the form has no part named 'file'"));
        }
        Ok(all)
    }

    /// Where a part goes; `None` for a part that is not for us. The file name is a whole path: nothing is stripped.
    fn path_of(&self, part: &Part) -> Result<Option<String>, HttpError> {
        if part.name != "file" {
            return Ok(None);
        }
        let filename = || part.filename.clone().filter(|filename| !filename.is_empty());
        match self.path.clone().or_else(filename) {
            Some(path) => Ok(Some(path)),
            None => Err(bad("a part has no file name and the query parameter 'path' is missing")),
        }
    }

    fn destination(&self, path: &str) -> Result<Destination, HttpError> {
        Ok(Destination {
            owner: self.user.clone(),
            path: resolve(path, &self.user, self.workdir.as_deref())?,
            metadata: self.metadata.clone(),
            gzip: self.gzip,
            length: self.length,
        })
    }

    fn written(&self, path: &Path) -> Written {
        let name = PathBuf::from(path.file_name().unwrap_or(path.as_os_str()));
        Written {
            path: path.to_string_lossy().into_owned(),
            name: name.to_string_lossy().into_owned(),
            r#type: "file",
            metadata: self.metadata.clone(),
        }
    }
}

/// Writes what `source` yields, in batches: one hop to a blocking thread for each, and none held while the client is slow.
async fn store(destination: Destination, mut source: impl Pieces) -> Result<(), HttpError> {
    let mut sink = Sink::open(destination).await?;
    let mut batch = BytesMut::new();
    loop {
        match source.piece().await {
            Ok(Some(bytes)) => batch.extend_from_slice(&bytes),
            Ok(None) => break,
            Err(error) => {
                sink.discard().await;
                return Err(error);
            }
        }
        if batch.len() >= BATCH {
            sink = sink.write(batch.split().freeze()).await?;
        }
    }
    if !batch.is_empty() {
        sink = sink.write(batch.freeze()).await?;
    }
    Ok(sink.finish().await?)
}

fn bad(message: impl Into<String>) -> HttpError {
    HttpError::new(StatusCode::BAD_REQUEST, message)
}
