//! `/files`: upload and download.

mod body;
mod disposition;
mod download;
mod encoding;
mod multipart;
mod open;
mod range;
mod sink;
mod upload;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use hyper::http::request::Parts;
use hyper::{Method, StatusCode};

use self::body::BodyReader;
use crate::auth::{check_file_access, FileOperation, SignedQuery};
use crate::error::HttpError;
use crate::filesystem::error::{FsError, FsErrorKind};
use crate::http::{query_param, Request, RequestBody, Response};
use crate::paths::resolve;
use crate::state::State;
use crate::users::{requested_user, User};

/// Answers every method of `/files` and `/files/…`. The access token has not been checked: see `auth::check_file_access`.
pub async fn handle(request: Request, state: Arc<State>) -> Response {
    let (head, body) = request.into_parts();
    let mut body = BodyReader::new(body);
    answer(&head, &mut body, &state).await.unwrap_or_else(HttpError::into_response)
}

/// The query of a file request, decoded.
struct Query {
    path: Option<String>,
    username: Option<String>,
    signature: Option<String>,
    expiration: Option<String>,
}

impl Query {
    fn of(request: &Parts) -> Self {
        let parameter = |name| query_param(request.uri.query(), name);
        Self {
            path: parameter("path"),
            username: parameter("username"),
            signature: parameter("signature"),
            expiration: parameter("signature_expiration"),
        }
    }
}

async fn answer(request: &Parts, body: &mut BodyReader<RequestBody>, state: &State) -> Result<Response, HttpError> {
    if request.uri.path() != "/files" {
        return Err(HttpError::new(StatusCode::NOT_FOUND, format!("no such path: {}", request.uri.path())));
    }
    let operation = match request.method {
        Method::GET | Method::HEAD => FileOperation::Read,
        Method::POST => FileOperation::Write,
        ref other => {
            let message = format!("{other} is not allowed on /files, use GET, HEAD or POST");
            return Err(HttpError::new(StatusCode::METHOD_NOT_ALLOWED, message));
        }
    };
    let query = Query::of(request);
    authorize(request, state, operation, &query)?;
    let user = effective_user(request, state, &query)?;
    match operation {
        FileOperation::Write => upload::upload(&request.headers, body, state, query, user).await,
        FileOperation::Read => {
            let workdir = state.settings().default_workdir;
            let path = resolve(query.path.as_deref().unwrap_or(""), &user, workdir.as_deref())?;
            download::download(request, &path).await
        }
    }
}

fn authorize(request: &Parts, state: &State, operation: FileOperation, query: &Query) -> Result<(), HttpError> {
    let signed = SignedQuery {
        path: query.path.as_deref().unwrap_or(""),
        username: query.username.as_deref().unwrap_or(""),
        signature: query.signature.as_deref(),
        expiration: query.expiration.as_deref(),
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let token = state.settings().access_token;
    check_file_access(token.as_deref(), &request.headers, operation, signed, now)
}

/// The user of the query, else of the Authorization header, else the default one. A signed URL speaks for the user it was signed
/// for, so a header cannot make it another's.
fn effective_user(request: &Parts, state: &State, query: &Query) -> Result<User, HttpError> {
    let from_header = match (&query.username, &query.signature) {
        (None, None) => requested_user(&request.headers)?,
        _ => None,
    };
    Ok(state.user_or_default(query.username.as_deref().or(from_header.as_deref()))?)
}

impl From<FsError> for HttpError {
    fn from(error: FsError) -> Self {
        let status = match error.kind {
            FsErrorKind::NotFound => StatusCode::NOT_FOUND,
            FsErrorKind::AlreadyExists => StatusCode::CONFLICT,
            FsErrorKind::InvalidArgument | FsErrorKind::FailedPrecondition => StatusCode::BAD_REQUEST,
            FsErrorKind::PermissionDenied => StatusCode::FORBIDDEN,
            FsErrorKind::ResourceExhausted => StatusCode::SERVICE_UNAVAILABLE,
            FsErrorKind::NoSpace => StatusCode::INSUFFICIENT_STORAGE,
            FsErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error.message)
    }
}
